"""Which local variables of a suspended coroutine still matter. Layer: sim.

A variable that is assigned before it is read again makes no difference to what a coroutine does
from here on. Leaving such variables out lets the exhaustive search see that two states are the
same, for example after a census whose outcome was thrown away. It is the textbook backward analysis
over the instructions of one function; whatever it does not understand counts as read.
"""

import dis
from functools import cache
from types import CodeType

_ENDS = ("RETURN", "RAISE", "RERAISE")
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_HANDLERS = ("CHECK_EXC_MATCH", "BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL")


@cache
def live(code: CodeType, offset: int) -> frozenset[str]:
    """Return the names of ``code`` that may be read after the instruction at ``offset``."""
    instructions = list(dis.get_instructions(code))
    everything = frozenset(code.co_varnames + code.co_cellvars + code.co_freevars)
    if any(i.opname in _HANDLERS for i in instructions):
        return everything
    hidden = frozenset(code.co_cellvars + code.co_freevars)
    position = {i.offset: n for n, i in enumerate(instructions)}
    if offset not in position:
        return everything
    following = [_following(n, i, position) for n, i in enumerate(instructions)]
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    changed = True
    while changed:  # ends: the sets only grow
        changed = False
        for n in range(len(instructions) - 1, -1, -1):
            reads, writes = _touches(instructions[n], everything)
            after = frozenset[str]().union(*(before[m] for m in following[n]))
            now = reads | (after - writes)
            changed |= now != before[n]
            before[n] = now
    return before[position[offset]] | hidden


def _following(n: int, instruction: dis.Instruction, position: dict[int, int]) -> list[int]:
    follows = []
    jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
    if jumps:
        follows.append(position[instruction.argval])
    ends = instruction.opname.startswith(_ENDS) or instruction.opname in _ALWAYS_JUMPS
    if not ends and n + 1 < len(position):
        follows.append(n + 1)
    return follows


def _touches(
    instruction: dis.Instruction, everything: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return what an instruction reads and what it overwrites."""
    operation, names = instruction.opname, instruction.argval
    if "_FAST" not in operation:
        return frozenset(), frozenset()
    if operation in ("STORE_FAST", "DELETE_FAST"):
        return frozenset(), frozenset({names})
    if isinstance(names, str):
        return frozenset({names}), frozenset()
    if isinstance(names, tuple):
        return frozenset(names), frozenset()
    return everything, frozenset()
