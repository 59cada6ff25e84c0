"""The shell scripts that run inside a box.

Owns their text and what they print; `remote`, `box_files` and `box_jobs` say when they run. Commands and killing need
`sh` and /proc alone; file transfer also needs what coreutils or busybox bring. Each is POSIX sh, tried with dash, bash
and busybox. They search the standard folders before the image's own PATH, so that a shim does not get to run as root.

Every process of a command inherits `MARKER`, whose value is the command's id: that is how one is found again after it
left its session. Processes of ours carry `OURS`. Reading another user's environment needs CAP_SYS_PTRACE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SHELL = "/bin/sh"
MARKER = "SANDBOX_COMMAND"
WRAPPER = "SANDBOX_WRAPPER"  # in the shells around a command, not in the command
OURS = "SANDBOX_OWN"  # its value is secret, else a command could pass for ours

NOT_THERE = 3  # exit code: the path is not what was asked for
BAD_USER = 4  # exit code: no such user or group

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def with_odd_names(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The command with those variables of `env` in front whose names a shell would not pass on, as `env` takes them."""
    odd = [f"{name}={value}" for name, value in env.items() if not _IDENTIFIER.fullmatch(name)]
    return ["env", *odd, *argv] if odd else list(argv)


# `o` = processes that the memory limit ended so far: of the box's cgroup (v1, v2), else of a whole virtual machine.
_OOMS = """
ooms() {
  o=0
  for f in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events /proc/vmstat; do
    [ -r $f ] || continue
    while read -r k v; do [ "$k" = oom_kill ] && o=$v; done < $f
    return 0
  done
}
"""

# In a subshell that has its streams already: the shell above it says "Killed" on its own stderr, which is nobody's.
_EXEC = f"""
become() {{
  unset {WRAPPER}
  case $1 in -*) exec -- "$@" ;; *) exec "$@" ;; esac
}}
"""

# Arguments: nonce, whether there is standard input, folder, then the command. When the command ends, both streams get
# the line "<nonce> <exit code> <out-of-memory kills>", and are left by the caller then. A server that the command left
# in the background still holds them: the two `cat` stay and read on, or its next write would kill it.
RUN = (
    _OOMS
    + _EXEC
    + """
n=$1 i=$2 d=$3; shift 3
exec 3>&1 4>&2 2>/dev/null
[ "$i" = 1 ] || exec </dev/null
trap 'echo "sandbox: too many processes in the box to start another" >&4; exit 126' EXIT
ooms; b=$o
go() {
  if cd "$d"; then (exec 2>&6 6>&-; become "$@"); c=$?
  else echo "sandbox: no folder $d to run in" >&6; c=126; fi
  ooms
  t="$n $c $((o - b))"
  printf '%s\\n' "$t"; printf '%s\\n' "$t" >&6
}
for k in /bin/cat /usr/bin/cat ''; do [ -x "$k" ] && break; done
if [ -n "$k" ]; then
  { go "$@" 6>&1 >&5 5>&- 3>&- 4>&- | "$k" >&4 3>&- 4>&- 5>&-; } 5>&1 | "$k" >&3 3>&- 4>&-
else
  go "$@" 6>&4 3>&- 4>&-
fi
trap - EXIT
"""
)

# Around the scripts below: the same line at the end, whatever ends them.
_FRAME = """
n=$1; shift
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
exec 4>&2
trap 'c=$?; printf "%s %s 0\\n" "$n" $c; printf "%s %s 0\\n" "$n" $c >&4' EXIT
trap 'exit 143' TERM
"""

# Arguments: "all" or a command's id, the start of time for this box, our secret, whether the command was alone, and
# seconds between SIGTERM and SIGKILL. Ends everything that started since, or everything of the command: what carries
# its id, descends from such a process or, if it was alone, became an orphan since it began.
# Builtins only: in a box full of processes nothing can be forked. Everything is stopped before anything is killed:
# killing one by one loses against a fork bomb. Exits 1 when something is left.
_KILL = f"""
which=$1 t0=$2 ours=$3 alone=$4 grace=$5
exec 2>/dev/null
slurp() {{ text=; while IFS= read -r line || [ -n "$line" ]; do text="$text$line "; line=; done < "$1"; }}
now() {{ read -r up rest < /proc/uptime; cs=${{up%.*}}${{up#*.}}; }}
look() {{
  turn=$((turn + 1)) all=
  for dir in /proc/[0-9]*; do
    pid=${{dir#/proc/}} text=
    slurp $dir/stat
    [ -n "$text" ] || continue
    set -- ${{text##*) }}
    case $1 in Z|X) continue ;; esac
    [ $pid = 1 ] || [ $pid = $$ ] && continue
    eval "turn_$pid=$turn parent_$pid=$2 start_$pid=${{20}} mark_$pid="
    [ ${{20}} -ge $t0 ] && all="$all $pid"
  done
}}
pick() {{
  targets= wrappers= first=
  [ "$which" = all ] && {{ targets=$all; return; }}
  for pid in $all; do
    slurp /proc/$pid/environ
    case $text in
      *{OURS}=$ours*) eval mark_$pid=ours ;;
      *$which*)
        eval "mark_$pid=its s=\\$start_$pid"
        [ -n "$first" ] && [ $first -le $s ] || first=$s
        case $text in *{WRAPPER}=1*) wrappers="$wrappers $pid"; [ $phase = 2 ] || continue ;; esac
        targets="$targets $pid" ;;
    esac
  done
  [ -n "$first" ] || return 0
  for pid in $all; do
    eval "m=\\$mark_$pid s=\\$start_$pid q=\\$parent_$pid"
    [ -z "$m" ] && [ $s -ge $first ] || continue
    while :; do
      eval "t=\\${{turn_$q:-0}}"
      [ $t = $turn ] || {{ m=orphan; break; }}
      eval "m=\\$mark_$q s=\\$start_$q"
      [ -n "$m" ] && break
      [ $s -lt $t0 ] && {{ m=orphan; break; }}
      [ $s -lt $first ] && {{ m=older; break; }}
      eval "q=\\$parent_$q"
    done
    [ $m = its ] || {{ [ $m = orphan ] && [ $alone = 1 ]; }} && targets="$targets $pid"
  done
  return 0
}}
freeze() {{
  tries=0
  while [ $tries -lt 300 ]; do
    tries=$((tries + 1)) new=
    look; pick
    for pid in $targets; do
      eval "s=\\$start_$pid"
      case $hit in *" $pid:$s "*) continue ;; esac
      kill -STOP $pid && hit="$hit$pid:$s " new=1
    done
    [ -n "$new" ] || break
  done
}}
slay() {{
  hit=' '
  freeze
  for h in $hit; do kill -KILL ${{h%:*}}; done
  now; end=$((cs + 150))
  while :; do
    left=
    for h in $hit; do
      text=
      slurp /proc/${{h%:*}}/stat
      [ -n "$text" ] || continue
      set -- ${{text##*) }}
      case $1 in Z|X) ;; *) [ ${{20}} = ${{h#*:}} ] && left="$left $h" ;; esac
    done
    now
    [ -n "$left" ] && [ $cs -lt $end ] || break
  done
}}
turn=0 phase=1
if [ "$which" != all ] && [ $grace -gt 0 ]; then
  look; pick; set -- $targets
  if [ $# -gt 0 ] && [ $# -le 64 ]; then
    kill -TERM $targets
    now; end=$((cs + grace))
    while [ -n "$targets" ] && [ $cs -lt $end ]; do sleep 0.05 || break; look; pick; now; done
  fi
fi
slay
if [ "$which" != all ]; then
  gone=$left tries=0
  while [ -n "$wrappers" ] && [ $tries -lt 6 ]; do tries=$((tries + 1)); sleep 0.05 || break; look; pick; done
  if [ -n "$wrappers" ]; then phase=2; slay; fi
  left=$gone$left
fi
[ -z "$left" ]
"""
KILL = _FRAME + _KILL

# Arguments: user ("" = root, "uid", "name", either with ":group"), whether we are root, our state folder, "new",
# "again" (it was restarted) or "adopt" (another process set it up), working folder, then the folders that must be
# there. Prints "<uid> <gid> <start ticks>", a line with the name and one with the home folder; the name is empty when
# nobody in /etc/passwd has that uid.
_MAKE = """
own() { if [ -n "$private" ]; then chmod 700 "$1"; elif [ -n "$owner" ]; then chown "$owner" "$1"; fi; }
enter() {
  cd / || return 1
  rest=${1#/} here=
  while [ -n "$rest" ]; do
    part=${rest%%/*}
    case $rest in */*) rest=${rest#*/} ;; *) rest= ;; esac
    if [ -L "./$part" ] || { [ -e "./$part" ] && [ ! -d "./$part" ]; }; then
      [ -n "$make" ] && rm -f "./$part" || return 1
    fi
    [ -d "./$part" ] || { [ -n "$make" ] && mkdir "./$part" && own "./$part"; } || return 1
    here=$here/$part
    cd -P "./$part" && [ "$PWD" = "$here" ] || return 1
  done
}
"""
_SETUP = f"""
user=$1 root=$2 state=$3 how=$4 work=$5; shift 5
find() {{
  found=
  while IFS=: read -r a b c d e f g || [ -n "$a" ]; do
    if [ "$a" = "$2" ] || [ "$c" = "$2" ]; then found=1; return; fi
  done < "$1"
}}
[ -n "$user" ] || user=0
case $user in *:*) group=${{user#*:}} ;; *) group= ;; esac
user=${{user%%:*}}
find /etc/passwd "$user" 2>/dev/null
if [ -n "$found" ]; then name=$a uid=$c gid=$d home=$f
else
  case $user in *[!0-9]*) echo "no user $user in /etc/passwd" >&2; exit {BAD_USER} ;; esac
  name= uid=$user gid=$user home=/home
  [ "$user" = 0 ] && home=/root
fi
if [ -n "$group" ]; then
  find /etc/group "$group" 2>/dev/null
  if [ -n "$found" ]; then gid=$c
  else case $group in *[!0-9]*) echo "no group $group in /etc/group" >&2; exit {BAD_USER} ;; *) gid=$group ;; esac; fi
fi
if [ $how = adopt ]; then
  IFS= read -r since < "$state/t0" || exit 1
  printf '%s %s %s\\n%s\\n%s\\n' "$uid" "$gid" "$since" "$name" "$home"
  exit 0
fi
make=1 private= owner=
[ -z "$root" ] || owner=$uid:$gid
[ $how = again ] || [ -z "$root" ] || rm -rf "$state"
umask 022
mkdir -p "$state/jobs" && chmod 711 "$state" "$state/jobs" || exit 1
enter "$work" || {{ echo "cannot make $work" >&2; exit 1; }}
for folder; do
  enter "$folder" || {{ echo "cannot make $folder" >&2; exit 1; }}
  if [ "$folder" = /tmp ]; then [ -n "$root" ] && chmod 1777 .
  elif [ -n "$owner" ] && [ "$uid" != 0 ]; then chown "$owner" .; fi
done
IFS= read -r text < /proc/$$/stat
set -f; set -- ${{text##*) }}
printf '%s\\n' "${{20}}" > "$state/t0"
chmod 600 "$state/t0"
printf '%s %s %s\\n%s\\n%s\\n' "$uid" "$gid" "${{20}}" "$name" "$home"
"""
SETUP = _FRAME + _MAKE + _SETUP
# Folders that everybody may pass, as far as they are there: images close the home folders of their users.
OPEN = _FRAME + 'for folder; do [ ! -d "$folder" ] || chmod o+x "$folder" || exit 1; done\n'

_FILE_ARGUMENTS = """
parent=$1 name=$2 owner=$3 private=$4; shift 4
make=1
"""
# The four above, then mode and size; the file comes in as standard input.
WRITE = (
    _FRAME
    + _MAKE
    + _FILE_ARGUMENTS
    + """
enter "$parent" || { echo "cannot make $parent" >&2; exit 1; }
temp=./.$n.tmp
umask 077; set -C
if cat > "$temp" && [ $(wc -c < "$temp") -eq "$2" ] && chmod "$1" "$temp" &&
  { [ -z "$owner" ] || chown "$owner" "$temp"; }
then
  if [ -L "./$name" ]; then rm -f "./$name"; elif [ -d "./$name" ]; then rm -rf "./$name"; fi
  mv -f "$temp" "./$name" && exit 0
fi
rm -f "$temp"
exit 1
"""
)
# The four above: an empty folder in place of whatever was there.
RESET = (
    _FRAME
    + _MAKE
    + _FILE_ARGUMENTS
    + """
enter "$parent" || { echo "cannot make $parent" >&2; exit 1; }
rm -rf "./$name" 2>/dev/null || { chmod -R u+rwx "./$name" 2>/dev/null; rm -rf "./$name" || exit 1; }
mkdir "./$name" && own "./$name"
"""
)
# The four above: the folder parent/name, made where it is missing; links in the way are removed.
ENSURE = _FRAME + _MAKE + _FILE_ARGUMENTS + 'enter "${parent%/}/$name" || { echo "cannot make $name" >&2; exit 1; }\n'
# Parent, name, "file" or "folder": whether that is what is there, reached by real folders only.
LOOK = (
    _FRAME
    + _MAKE
    + f"""
make=
enter "$1" 2>/dev/null && [ ! -L "./$2" ] || exit {NOT_THERE}
case $3 in file) [ -f "./$2" ] ;; *) [ -d "./$2" ] ;; esac || exit {NOT_THERE}
"""
)
# As LOOK for a file, then the number of bytes to print of it.
READ = LOOK + 'head -c "$4" "./$2"\n'

# A job is a folder of root's with files of the job's user: in, out, err, pid ("<pid> <start ticks>"), code ("<exit
# code> <out-of-memory kills> <hundredths of a second that it took>", empty while it runs); and root's own `timeout`,
# which is there once its time was up.
# Arguments: state folder, id, owner, seconds until it is killed ("" = never), start of time, our secret.
JOB_NEW = (
    _FRAME
    + """
umask 066
mkdir "$1/jobs/$2" && chmod 711 "$1/jobs/$2" && cd "$1/jobs/$2" || exit 1
umask 077
cat > in && : > out && : > err && : > pid && : > code || exit 1
[ -z "$3" ] || chown "$3" in out err pid code || exit 1
[ -n "$4" ] || exit 0
(
  trap - EXIT
  sleep "$4"
  [ -s code ] && exit
  : > timeout
  exec /bin/sh -c "$7" sh "$2" "$5" "$6" 0 50
) </dev/null >/dev/null 2>&1 4>&- &
exit 0
"""
)
JOB_KILL = _KILL

_JOB_BODY = (
    _OOMS
    + _EXEC
    + """
j=$1 d=$2; shift 2
now() { read -r up rest < /proc/uptime; cs=${up%.*}${up#*.}; }
ooms; b=$o; now; t0=$cs
if cd "$d"; then (exec <"$j/in" >>"$j/out" 2>>"$j/err"; become "$@"); c=$?
else echo "sandbox: no folder $d to run in" >>"$j/err"; c=126; fi
ooms; now
printf '%s %s %s\\n' "$c" "$((o - b))" "$((cs - t0))" > "$j/code"
"""
)
# Arguments: script of the job, its folder, working folder, then the command. Runs as the job's user.
JOB_START = (
    _FRAME
    + """
body=$1; shift
trap '' HUP
/bin/sh -c "$body" sh "$@" </dev/null >/dev/null 2>&1 4>&- &
IFS= read -r text < /proc/$!/stat || exit 1
j=$1; set -f; set -- ${text##*) }
printf '%s %s\\n' $! "${20}" > "$j/pid"
"""
)
JOB_BODY = _JOB_BODY

# Arguments: the job's folder, hundredths of a second to wait for its end, bytes to print of each stream. Prints the
# line "<running|ended|timeout|lost> <exit code> <bytes of out> <bytes of err> <out-of-memory kills> <hundredths>" (a
# dash = none), then the streams, each half from its start and half from its end.
JOB_STATUS = (
    _FRAME
    + f"""
cd "$1" 2>/dev/null || exit {NOT_THERE}
alive() {{
  read -r p s < pid || return 1
  text=
  IFS= read -r text < /proc/$p/stat || return 1
  set -f; set -- ${{text##*) }}
  case $1 in Z|X) return 1 ;; esac
  [ "${{20}}" = "$s" ]
}}
look() {{
  a=; alive 2>/dev/null && a=1
  code= kills= took=
  read -r code kills took < code
  if [ -n "$code" ]; then state=ended; elif [ -n "$a" ]; then state=running; else state=lost; fi
}}
now() {{ read -r up rest < /proc/uptime; cs=${{up%.*}}${{up#*.}}; }}
wait=$2 cap=$3 step=0.05
now; end=$((cs + wait))
while look; [ $state = running ]; do
  now
  [ $cs -lt $end ] || break
  sleep $step || break
  case $step in 0.05) step=0.1 ;; 0.1) step=0.2 ;; *) step=0.5 ;; esac
done
[ $state != running ] && [ -e timeout ] && state=timeout
a=$(($(wc -c < out))) b=$(($(wc -c < err)))
printf '%s %s %s %s %s %s\\n' $state "${{code:--}}" $a $b "${{kills:--}}" "${{took:--}}"
show() {{
  if [ $2 -le $cap ]; then head -c $2 $1
  else head -c $((cap - cap / 2)) $1; tail -c +$(($2 - cap / 2 + 1)) $1 | head -c $((cap / 2)); fi
}}
show out $a
show err $b >&2
exit 0
"""
)

# Arguments: archive, target; names on standard input. What is in the way of an entry goes first: tar would keep a
# folder that is in the way of a file, and some versions follow links.
UNPACK = """
cd "$2" || exit 1
xargs -0 sh -c '
  for e; do
    case $e in */) e=${e%/}; [ -d "$e" ] && [ ! -L "$e" ] && continue ;; esac
    rm -rf -- "$e"
  done' sh
tar -xpf "$1"; c=$?
rm -f -- "$1"
exit $c
"""
