"""A tunnel's program: leads from 127.0.0.2, which plays the public internet, to a port of 127.0.0.1.

`playing_tunnel.py PORT FOLDER` prints its address among other lines, as such programs do. The folder steers it: `deaf`
= it goes on running and leads nowhere. Its process id is in `pid`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from sandboxes.relay import Relay


async def main(port: int, folder: Path) -> None:
    (folder / "pid").write_text(str(os.getpid()))
    relay = Relay(("127.0.0.1", port))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(relay.accept, "127.0.0.2", 0)
    print(f"see https://docs.tunnel.invalid/help; forwarding to http://127.0.0.1:{port}", flush=True)
    print("knows of the run's keys:", [name for name in os.environ if name.startswith("CAPTURE_PROXY")], flush=True)
    print(f"your address: http://127.0.0.2:{server.sockets[0].getsockname()[1]}/", flush=True)
    while not (folder / "deaf").exists():
        await asyncio.sleep(0.01)
    server.close()
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
