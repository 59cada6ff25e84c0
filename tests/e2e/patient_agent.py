"""An agent of three calls that asks again when a call fails; the instruction on stdin, its last answer on stdout."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(3):
    for _ in range(60):
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
        headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
        try:
            url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
            with opener.open(urllib.request.Request(url, body, headers), timeout=300) as reply:
                message = json.load(reply)["choices"][0]["message"]
            break
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                sys.exit(f"refused: {error.code}")
        except OSError:
            pass
        time.sleep(0.5)
    else:
        sys.exit("the model could not be reached")
    messages += [{"role": "assistant", "content": message["content"] or ""}, {"role": "user", "content": "Go on."}]
print(message["content"] or "")
