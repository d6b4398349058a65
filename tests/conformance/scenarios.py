"""The scenarios of the conformance suite: who runs what, who dies, what comes out."""

from collections.abc import Callable

from recover.core.mesh import Mesh, Place
from tests.conformance.programs import Scenario, Strike, Value

FLAT = Mesh(4)
DEEP = Mesh(3, 2)


def _everywhere(value: Value) -> Callable[[Place], Value]:
    return lambda place: value


def _census_of(mesh: Mesh) -> Value:
    places = sorted(mesh.place(rank) for rank in range(mesh.world_size))
    return [[str(p), p.replica + 1, p.shard == 0, p.replica] for p in places]


def _quiet(mesh: Mesh) -> list[Scenario]:
    buckets = 2
    return [
        Scenario("vote", mesh, _everywhere([True, False, True, False])),
        Scenario("detect", mesh, lambda place: [place.shard != 0, True, True]),
        Scenario("reduce", mesh, _everywhere([True] * (buckets + 1))),
        Scenario("census", mesh, _everywhere(_census_of(mesh))),
        Scenario(
            "shrink",
            mesh,
            _everywhere([True, 1, [str(mesh.place(r)) for r in range(mesh.world_size)], True]),
        ),
        Scenario("train", mesh, _everywhere(_trained(mesh.everyone()))),
    ]


def _trained(survivors: tuple[int, ...]) -> Value:
    return {"survivors": list(survivors), "step": 2, "committed": 12}


def _training(mesh: Mesh, *strikes: Strike) -> Scenario:
    hit = {mesh.place(s.world_rank).replica for s in strikes if s.when != "fault"}
    dead = tuple(r for r in range(mesh.world_size) if mesh.place(r).replica in hit)
    left = tuple(r for r in mesh.everyone() if r not in hit)
    return Scenario("train", mesh, _everywhere(_trained(left)), strikes, dead)


def _mending(mesh: Mesh, *strikes: Strike) -> Scenario:
    struck = tuple(sorted(strike.world_rank for strike in strikes))
    hit = {mesh.place(rank).replica for rank in struck}
    dead = tuple(r for r in range(mesh.world_size) if mesh.place(r).replica in hit)
    shares = {str(r): r for r in mesh.everyone() if r not in hit}
    expected = [[shares, list(struck)], True, True]
    return Scenario("mend", mesh, _everywhere(expected), strikes, dead)


QUIET = [*_quiet(FLAT), *_quiet(DEEP)]

DISTURBED = [
    # one primitive at a time
    Scenario("reduce_once", FLAT, _everywhere(False), (Strike(3, "Detect"),), (3,)),
    Scenario("reduce_once", FLAT, _everywhere(False), (Strike(0, "Reduce"),), (0,)),
    Scenario("reduce_once", FLAT, _everywhere(False), (Strike(1, "Reduce", 1, "during"),), (1,)),
    Scenario("reduce_once", DEEP, _everywhere(False), (Strike(3, "Reduce"),), (3,)),
    Scenario("reduce_once", FLAT, _everywhere(False), (Strike(1, "Reduce", 0, "fault"),)),
    Scenario(
        "shrink",
        FLAT,
        _everywhere([False, 1, ["0.0", "1.0", "3.0"], True]),
        (Strike(2, "Agree"),),
        (2,),
    ),
    # repair, and deaths inside it
    _mending(FLAT, Strike(0, "Agree"), Strike(3, "Shrink")),
    _mending(FLAT, Strike(1, "Agree"), Strike(2, "Census")),
    _mending(FLAT, Strike(1, "Agree"), Strike(0, "Agree", 1)),
    _mending(DEEP, Strike(0, "Agree")),
    _mending(DEEP, Strike(2, "Agree"), Strike(5, "Regroup")),
    _mending(DEEP, Strike(4, "Agree"), Strike(1, "Census", 0, "during")),
    # whole iterations
    _training(FLAT, Strike(3, "Accumulate")),
    _training(FLAT, Strike(0, "Reduce", 1)),
    _training(FLAT, Strike(2, "Reduce", 2, "during"), Strike(1, "Reduce", 3)),
    _training(FLAT, Strike(1, "Agree"), Strike(2, "Accumulate", 1)),
    _training(FLAT, Strike(1, "Commit")),
    _training(FLAT, Strike(3, "Agree", 2)),
    _training(FLAT, Strike(0, "Reduce"), Strike(1, "Census"), Strike(2, "Agree", 3)),
    _training(FLAT, Strike(2, "Reduce", 0, "fault")),
    _training(DEEP, Strike(2, "Reduce", 0, "fault")),
    _training(DEEP, Strike(1, "Reduce")),
    _training(DEEP, Strike(2, "Reduce", 1, "during"), Strike(5, "Regroup")),
]
