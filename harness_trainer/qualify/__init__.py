"""Qualification: each real agent on scripted tasks, on the product's own rollout path, judged by what was captured.

Owns the scenarios, the scripted model that plays them, and the verdicts. The path itself (sandbox, gateway, adapter,
verifier) is `rollouts`' and `capture_proxy`'s. Called by `cli.qualify`.
"""
