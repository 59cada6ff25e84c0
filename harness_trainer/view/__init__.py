"""The trace viewer and live dashboard: a run's folder as pages in a browser, also while the run goes on.

Reads and never writes: the store through short read-only transactions (`reading`), files up to a limit (`series`,
`kept`). What is asked of them is in `overview`, `attempts` and `traces`, how it looks in `pages` and `templates/`, who
may ask in `guard`. All that a model, an agent or a test has said is text, and untrusted (`visible`). Started by
`cli.view`.
"""
