"""Random sequences of exchanges over random groups, and what each must return."""

from hypothesis import strategies as st

from drumline.contract.ports import Reduce

VALUES = st.integers(-(2**40), 2**40)
PAYLOADS = st.one_of(st.binary(max_size=40), st.sampled_from((b"", b"x" * 20_000, b"y" * 70_000)))


@st.composite
def steps(draw, groups):
    """Return one step: the place of its group, its kind, and each member's part."""
    place = draw(st.integers(0, len(groups) - 1))
    size = len(groups[place])
    kind = draw(st.sampled_from(("gather", "ints", "reduce", "broadcast")))
    if kind in {"gather", "broadcast"}:
        parts = draw(st.lists(PAYLOADS, min_size=size, max_size=size))
        detail = draw(st.integers(0, size - 1))
    else:
        row = st.lists(VALUES, min_size=(width := draw(st.integers(0, 4))), max_size=width)
        parts = draw(st.lists(row, min_size=size, max_size=size))
        detail = draw(st.sampled_from(Reduce))
    return place, kind, detail, parts


@st.composite
def programs(draw, size):
    """Return groups over `size` ranks, and steps over them in one order that all ranks keep."""
    ranks = st.permutations(range(size)).flatmap(
        lambda order: st.integers(1, size).map(lambda count: tuple(order[:count]))
    )
    groups = draw(st.lists(ranks, min_size=1, max_size=4))
    return groups, draw(st.lists(steps(groups), max_size=10))


def carry_out(mesh, program, name):
    """Do one rank's steps; returns what its exchanges returned."""
    members, todo = program
    groups = {
        place: mesh.group(ranks, f"{name}{place}")
        for place, ranks in enumerate(members)
        if mesh.index in ranks
    }
    results = []
    for place, kind, detail, parts in todo:
        if place not in groups:
            continue
        group = groups[place]
        part = parts[group.index]
        match kind:
            case "gather":
                results.append(group.all_gather(part))
            case "ints":
                results.append(group.all_gather_ints(part))
            case "reduce":
                results.append(group.all_reduce(part, detail))
            case _:
                results.append(group.broadcast(detail, part))
    return results


def expected(program, rank):
    """Return what the plain model says that one rank's exchanges return."""
    members, todo = program
    fold = {Reduce.MIN: min, Reduce.MAX: max, Reduce.SUM: sum}
    results = []
    for place, kind, detail, parts in todo:
        if rank not in members[place]:
            continue
        match kind:
            case "reduce":
                results.append([fold[detail](column) for column in zip(*parts, strict=True)])
            case "broadcast":
                results.append(parts[detail])
            case _:
                results.append(parts)
    return results
