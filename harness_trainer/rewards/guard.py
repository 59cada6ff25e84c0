"""What keeps an agent's leavings from steering the tests: clean variables, folders of our own, no links into the tests.

Owns the scripts that run in the sandbox for that. `verifier` calls it after the agent's processes were stopped, so that
nothing changes between looking and running. Needs /bin/sh; `find` and `realpath` where there are links to look at.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness_trainer.rewards.base import Code, Finding
from sandboxes.base import Command, RunResult, Sandbox, SandboxError

TESTS, LOGS, PRIVATE = "/tests", "/logs/verifier", "/verifier"  # made anew before the tests run
_SHOWN = 5  # dropped entries that are named in a finding
_TIMEOUT_S = 120.0
# Libraries forced into every program: never for the tests, unless [verifier.env] says so.
_PRELOADS = {"LD_PRELOAD": "", "LD_AUDIT": ""}
# Our own scripts trust neither the image's variables, which may name places that the agent could write to, nor
# /usr/local. The shell is named by its full path for the same reason.
_OURS = {**_PRELOADS, "LD_LIBRARY_PATH": "", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}

# $1 = who shall own them ("" = leave them as they are), then the tests, the logs, our private folder, then where to
# look for links. Prints each link that it removed because it led to one of the three, or to a folder above them. The
# second pass asks for one link at a time and is only made when the first has found something.
_SETTLE = r"""
owner=$1 tests=$2 logs=$3 private=$4; shift 4
umask 077
mkdir -p "$private/home" "$private/tmp" || exit 1
[ -z "$owner" ] || chown -R "$owner" "$tests" "$logs" "$private" || exit 1
[ "$#" -gt 0 ] || exit 0
rule='leads_there() {
  case $1/ in "$tests"/*|"$logs"/*|"$private"/*|//) return 0 ;; esac
  for kept in "$tests" "$logs" "$private"; do case $kept/ in "$1"/*) return 0 ;; esac; done
  return 1
}'
eval "$rule"
found=$(find "$@" -xdev -type l -exec realpath {} + 2>/dev/null |
  while IFS= read -r to; do if leads_there "$to"; then echo yes; break; fi; done)
[ -n "$found" ] || exit 0
export rule tests logs private
find "$@" -xdev -type l -exec /bin/sh -c 'eval "$rule"; for link; do
  to=$(realpath "$link" 2>/dev/null) && leads_there "$to" && rm -f "$link" && printf "%s\n" "$link"
done' sh {} + 2>/dev/null
exit 0
"""

# $1 = "asked" when being able to write counts as distrust, then folders whose contents are distrusted. Prints
# NAME=VALUE for each variable that had to be changed, and -NAME=ENTRY for what was taken out. Shell built-ins only.
_FILTER = r"""
set -f; how=$1; shift
trusted() {
  entry=$1; shift
  case $entry in /*) ;; *) return 1 ;; esac
  real=$(cd -P "$entry" 2>/dev/null && pwd -P)
  if [ -z "$real" ]; then
    above=${entry%/*}
    real=$(cd -P "${above:-/}" 2>/dev/null && pwd -P) || real=$above
    real=${real%/}/${entry##*/}
  fi
  for folder; do case $real/ in "$folder"/*) return 1 ;; esac; done
  [ "$how" = asked ] || return 0
  while [ -n "$real" ]; do
    if [ -w "$real" ]; then return 1; fi
    real=${real%/*}
  done
  [ ! -w / ]
}
for name in PATH PYTHONPATH PYTHONHOME PYTHONSTARTUP LD_LIBRARY_PATH BASH_ENV ENV NODE_PATH \
    PERL5LIB RUBYLIB GIT_EXEC_PATH GIT_TEMPLATE_DIR; do
  eval "value=\${$name-}"
  [ -n "$value" ] || continue
  kept=; cut=; IFS=:
  for item in $value; do
    if trusted "$item" "$@"; then kept=${kept:+$kept:}$item; else cut=1; printf '%s\n' "-$name=$item"; fi
  done
  unset IFS
  [ -z "$cut" ] || printf '%s\n' "$name=$kept"
done
"""


async def settle(box: Sandbox, *, owner: str | None, look_in: Sequence[str]) -> list[Finding]:
    """Give the tests' folders to `owner` (None = leave them) and remove links of `look_in` that lead to them.

    Without this, an agent scores by making its answer a link to the expected one. Runs as root where `owner` is set.
    """
    where = [box.resolve(path) for path in (TESTS, LOGS, PRIVATE, *look_in)]
    done = await _script(box, _SETTLE, [owner or "", *where], user=None if owner is None else "root")
    if done.exit_code != 0:
        raise SandboxError(f"cannot prepare the tests' folders: {done.stderr.strip()[-200:] or done.stdout[-200:]}")
    removed = done.stdout.splitlines()
    return [Finding(Code.LINK_DROPPED, f"led to the tests: {shown(removed)}")] if removed else []


async def clean_variables(
    box: Sandbox, *, ask_agent: bool, distrusted: Sequence[str]
) -> tuple[dict[str, str], list[Finding]]:
    """What to set for the tests so that no search path leads where the agent could have put something.

    `ask_agent` = run the check as the sandbox's own user, and count what that user can write to; `distrusted` are
    folders that count in any case.
    """
    how = "asked" if ask_agent else ""
    done = await _script(box, _FILTER, [how, *(box.resolve(path) for path in distrusted)], keep_env=True)
    if done.exit_code != 0:
        raise SandboxError(f"cannot check the sandbox's search paths: {done.stderr.strip()[-200:]}")
    changed, dropped = dict(_PRELOADS), []
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        if name.startswith("-"):
            dropped.append(f"{name[1:]} {value or '(empty)'}")
        else:
            changed[name] = value
    if "PATH" in changed and not changed["PATH"]:
        changed["PATH"] = _OURS["PATH"]
    hint = "the agent could write there; a task that needs it sets the variable in [verifier.env]"
    return changed, [Finding(Code.PATH_DROPPED, f"{shown(dropped)}: {hint}")] if dropped else []


def shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(name[:100] for name in names[:_SHOWN]) + more


async def _script(
    box: Sandbox, script: str, args: Sequence[str], *, user: str | None = None, keep_env: bool = False
) -> RunResult:
    env = _PRELOADS if keep_env else _OURS
    return await box.run(
        Command(["/bin/sh", "-c", script, "sh", *args], cwd="/", env=env, timeout_s=_TIMEOUT_S, user=user)
    )
