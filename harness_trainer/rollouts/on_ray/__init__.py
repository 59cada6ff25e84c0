"""`rollouts.executor: ray`: attempts run on the nodes of a Ray cluster, each whole, by the code that runs them here.

The seam is one attempt. The runner keeps groups, retries, scores of a person's function, the store and the gateway's
admin key; on each node a worker (one Ray actor) opens sandboxes, their pool and agents as the runner itself would, and
`rollout.run_rollout` runs there unchanged. A sandbox backend behind an actor would have sent every file and every
command's output through the runner, which is then what the nodes wait for.

`opened` opens it for the runner: `executor` deals attempts out to the nodes that `members` keeps open, `errand` is one
attempt as the runner sees it, `worker` what runs on a node, over `desk` (what it asks the runner for) and `afterwards`
(who cleans up when it is killed). `messages` is what passes between both sides, `files` what of it are files, `reach`
how a node reaches the gateway, `nodes` which node takes how many. `cluster` alone imports ray; `precheck` asks for a
cluster before anything slow is started.
"""
