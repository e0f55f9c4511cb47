"""Print pip's settings as shell commands that set uv's variables, which uv reads instead.

    pip config list | python scripts/uv_settings.py

A setting that uv cannot be given ends with status 1 and a sentence that names it; then pip itself
has to install. What the user set for uv stays.
"""

import ast
import os
import shlex
import sys
from collections.abc import Iterable

# What pip calls it, and uv. Lists are separated by blanks there, here as uv wants it.
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", None),
    "client-cert": ("SSL_CLIENT_CERT", None),
    "proxy": ("ALL_PROXY", None),
    "timeout": ("UV_HTTP_TIMEOUT", None),
    "default-timeout": ("UV_HTTP_TIMEOUT", None),
    "retries": ("UV_HTTP_RETRIES", None),
    "no-cache-dir": ("UV_NO_CACHE", None),
}
# How pip talks, or where it installs, which the script decides.
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "config-file",
    "disable-pip-version-check",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "root-user-action",
    "use-feature",
    "user",
    "verbose",
}
# Later ones win, as in pip.
SECTIONS = ("global", "install", ":env:")


def settings(lines: Iterable[str]) -> dict[str, str]:
    """Read what `pip config list` prints: one ``section.name='value'`` a line."""
    found: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in lines:
        key, _, value = line.strip().partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))
    return {
        name: value for section in SECTIONS for name, value in found[section].items()
    }


def variables(of_pip: dict[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's settings. Raises ValueError for one that uv has not got."""
    unknown = sorted(of_pip.keys() - VARIABLES.keys() - WITHOUT_EFFECT)
    if unknown:
        raise ValueError(f"uv does not know pip's setting {unknown[0]}")
    found = {}
    for name, (variable, separator) in VARIABLES.items():
        if of_pip.get(name):
            value = of_pip[name]
            found[variable] = (
                value if separator is None else separator.join(value.split())
            )
    return found


def main() -> int:
    """Translate standard input."""
    try:
        found = variables(settings(sys.stdin))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for name, value in found.items():
        if name not in os.environ:
            print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
