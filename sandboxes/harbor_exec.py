"""Commands in a Harbor environment, whose `exec` answers once, at the end, with text: as streams of bytes.

Owns the two shell scripts that make one of the other: the command is started in the background of the box, writing to
files, and a second script hands over what is new in them as base64, again and again, until the command ended or nobody
wants more. A connection is then never open for long, and what a command leaves running holds nothing open.
"""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass

from sandboxes.box_calls import Exec

CHUNK = 4_000_000  # bytes of each stream in one answer
WAIT_TICKS = 100  # of 0.05 s that one answer waits for news
MAX_STDIN = 60_000  # bytes that go in with the command; Linux takes 128 KiB in one argument

# In the folder @D: in, out, err, pid of the command, code once it is known (the shell that notes it may be killed).
_START = """
umask 077
mkdir @D || exit 97
@STDIN
s=; command -v setsid >/dev/null 2>&1 && s=setsid
(
  trap '' HUP
  $s sh -c 'echo $$ > "$0"; cd "$1" || exit 126; shift; exec "$@"' @D/pid @CWD @ARGV
  echo $? > @D/new; mv @D/new @D/code
) < @D/in > @D/out 2> @D/err &
while [ ! -s @D/pid ] && kill -0 $! 2>/dev/null; do sleep 0.01; done
"""
# Prints a line "@", size of out, size of err, exit code ("-" = still running, "?" = gone without one), then both
# streams from where the caller is, a line each. Reads the code before the sizes, so that with a code they are final.
# When some output came, more may be right behind it, but a slow stream is not held back for long.
_POLL = """
d=@D o=@OUT e=@ERR n=0 quiet=0 was= gone=0
read -r pid 2>/dev/null < $d/pid || { echo '@ 0 0 ?'; echo; echo; exit; }
while :; do
  code=-
  [ -s $d/code ] || case "$(cat /proc/$pid/stat 2>/dev/null)" in ''|*') Z '*) gone=$((gone + 1)) ;; esac
  [ $gone -lt 10 ] || code='?'
  [ -s $d/code ] && read -r code < $d/code
  os=$(wc -c < $d/out) es=$(wc -c < $d/err)
  [ "$code" = - ] || break
  if [ $os -gt $o ] || [ $es -gt $e ]; then
    if [ "$was" = "$os $es" ]; then quiet=$((quiet + 1)); else quiet=0; fi
    if [ $quiet -ge 2 ] || [ $((os - o + es - e)) -ge @CHUNK ]; then break; fi
  fi
  was="$os $es"
  n=$((n + 1)); [ $n -lt @TICKS ] || break
  sleep 0.05
done
echo "@" $os $es "$code"
tail -c +$((o + 1)) $d/out | head -c @CHUNK | base64 | tr -d '\\n'; echo
tail -c +$((e + 1)) $d/err | head -c @CHUNK | base64 | tr -d '\\n'; echo
if [ "$code" != - ] && [ $((os - o)) -le @CHUNK ] && [ $((es - e)) -le @CHUNK ]; then rm -rf $d; fi
"""


@dataclass(frozen=True, slots=True)
class News:
    """What one answer brought. Example: News(b"hi\\n", b"", code=0, is_all=True)."""

    out: bytes
    err: bytes
    code: int | None  # None = it still runs, or went without leaving one
    is_all: bool  # it ended and nothing is left to fetch


def start_script(command: Exec, folder: str, stdin_file: str | None = None) -> str:
    """Starts the command. `stdin_file` is a file in the box that becomes its input, where that is large."""
    argv = list(command.argv)
    if command.env:
        # Not by way of Harbor: the shells around the command must not be taken for it.
        argv = ["env", *(f"{name}={value}" for name, value in command.env.items()), *argv]
    if stdin_file is not None:
        stdin = f"mv {stdin_file} @D/in"
    elif command.stdin:
        stdin = f"echo {base64.b64encode(command.stdin).decode()} | base64 -d > @D/in"
    else:
        stdin = ": > @D/in"
    text = _START.replace("@STDIN", stdin).replace("@D", folder)
    return text.replace("@CWD", shlex.quote(command.cwd or "/")).replace("@ARGV", shlex.join(argv))


def poll_script(folder: str, num_out: int, num_err: int) -> str:
    """Waits for news beyond so many bytes of each stream, at most a few seconds."""
    values = {"@D": folder, "@OUT": num_out, "@ERR": num_err, "@CHUNK": CHUNK, "@TICKS": WAIT_TICKS}
    text = _POLL
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def parse_news(text: str, num_out: int, num_err: int) -> News | None:
    """What `poll_script` printed; None when it was cut short (everything in the box was killed, say)."""
    lines = text.split("\n")
    at = next((number for number in reversed(range(len(lines))) if lines[number].startswith("@ ")), None)
    if at is None or len(lines) < at + 4:
        return None
    try:
        _, size_out, size_err, code = lines[at].split()
        out, err = (base64.b64decode(line, validate=True) for line in lines[at + 1 : at + 3])
    except ValueError:  # binascii.Error is one
        return None
    is_all = code != "-" and num_out + len(out) >= int(size_out) and num_err + len(err) >= int(size_err)
    return News(out, err, int(code) if code.isdigit() else None, is_all)
