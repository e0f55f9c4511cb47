"""Determinise a regular expression over bytes, in a process of its own.

How many states an expression has shows only while they are made: a short one may have billions.
outlines_core makes them at a stretch, so the process gets limits of memory and time, and is given
up beyond them. It runs this file as a script, which therefore imports nothing of ours.
"""

import json
import math
import resource
import subprocess
import sys
from array import array

MEMORY = 2 << 30  # bytes of the process's address space
# Times its seconds by the clock, for other processes may keep it waiting.
PATIENCE = 3
DEAD = -1
# Follows every text: if a text may end, outlines_core drops later alternatives.
BEHIND = "\U0010ffff"


def main() -> None:
    """Read a JSON object from standard input, and write the states to standard output.

    Output: int32 numbers. How many states there are, 1 per state whose text is complete, else 0,
    and for each state its successor by each of 256 bytes, DEAD if there is none. State 0 is the
    first one.
    """
    from outlines_core import Index, Vocabulary, json_schema

    asked = json.load(sys.stdin)
    most = math.ceil(asked["seconds"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    pattern = asked.get("pattern")
    if pattern is None:
        pattern = json_schema.build_regex_from_schema(
            asked["schema"], asked["whitespace"]
        )
    # 256 stands for the end of a text, which final states report as a successor.
    bytes_alone = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    index = Index(f"(?:{pattern}){BEHIND}", bytes_alone)
    transitions = index.get_transitions()
    finals = index.get_final_states()
    names = {index.get_initial_state(): 0}
    for state in transitions:
        names.setdefault(state, len(names))
    if len(names) > asked["most"]:
        sys.exit(f"{len(names)} states, at most {asked['most']}")
    table = array("i", [DEAD]) * (256 * len(names))
    for state, targets in transitions.items():
        for byte, target in targets.items():
            if byte < 256 and target not in finals:
                table[256 * names[state] + byte] = names[target]
    complete = array("i", [_ends(transitions, state) in finals for state in names])
    for part in (array("i", [len(names)]), complete, table):
        sys.stdout.buffer.write(part.tobytes())


def _ends(transitions: dict[int, dict[int, int]], state: int) -> int:
    """Return the state once a text has ended here."""
    for byte in BEHIND.encode():
        state = transitions.get(state, {}).get(byte, DEAD)
    return state


def determinise(asked: dict[str, object], seconds: float) -> bytes | None:
    """Return what :func:`main` writes for a pattern or a schema; None if it fails.

    Args:
        asked: `pattern`, or `schema` (JSON) and `whitespace` (a pattern), and `most` states.
        seconds: of a processor.
    """
    try:
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(asked | {"seconds": seconds}).encode(),
            capture_output=True,
            timeout=PATIENCE * seconds,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    return done.stdout


if __name__ == "__main__":
    main()
