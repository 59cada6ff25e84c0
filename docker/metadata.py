"""Writes the program's *.dist-info beside its packages, as an installation would: its version and its entry points.

vLLM finds our plug-in by them. An image needs no build backend for that. Run in the folder of pyproject.toml.
"""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
folder = Path(f"{project['name'].replace('-', '_')}-{project['version']}.dist-info")
folder.mkdir()
lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
(folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
groups = {"console_scripts": project["scripts"], **project["entry-points"]}
sections = [
    "\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in group.items())]) for name, group in groups.items()
]
(folder / "entry_points.txt").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
