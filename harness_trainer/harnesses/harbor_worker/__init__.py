"""The half of the agents' bridge to Harbor that runs in Harbor's own Python (3.12): makes agents and drives them.

Run as `python -P FOLDER`, never imported by us: `check ORDER` says whether Harbor has an agent, as {"problem": "one
line"} in the last line of its output; `serve FD` is the worker of a run. FD is a socket of packets:

    {"version": "0.26.0"}                      ours, first
    {"fork": "r1", "log": PATH} with one FD    a rollout's process, whose socket the FD is; it prints into the log
    {"kill": "r1"}                             end it and what it started
    {"ended": "r1", "status": -9}              ours: it has ended, with that exit code or by that signal

Each rollout has a process of its own, forked from one that has imported Harbor already: agents block, read and change
`os.environ`, and call models from here; none must see or hold up another. On a rollout's socket are JSON lines, the
first the `Order`. After it either side calls the other: {"call": 1, "op": "run", ...} is answered by {"answer": 1,
"value": {...}} or {"answer": 1, "error": "one line", "kind": "..."}, and {"cancel": 1} ends a call, which is answered
all the same. We are asked to `setup`, `run` and `collect`; we ask for the commands and files of the sandbox.

`worker` forks, `rollout` is what happens in each process, over `peer`'s talk, with Harbor's `agent` in our `sandbox`.
The modules import each other relatively: there they are a package of their own (`__main__`), without those around it.
"""
