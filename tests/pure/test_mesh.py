"""Meshes: every form of --mesh, and one message for each that is none."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtengine.layout import MESH_AXES
from dtengine.mesh import Mesh, build_mesh, check_world, num_ranks, parse_mesh
from dtengine.torch_private import fake_process_group

FORM = "A mesh is sizes as 8 or 2x4, or named axes as rep=2,dp=2,tp=2."
NAMES = "Use pp, rep, dp, tp."


def no_number(text: str, size: str, name: str = "dp") -> str:
    return f"--mesh {text}: {size} for {name} must be a whole number of at least 1. {FORM}"


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("1", {"dp": 1}),
        ("8", {"dp": 8}),
        ("2x4", {"dp": 2, "tp": 4}),
        ("2x3", {"dp": 2, "tp": 3}),
        ("1x1", {"dp": 1, "tp": 1}),
        ("1x2x3", {"pp": 1, "dp": 2, "tp": 3}),
        ("tp=3", {"tp": 3}),
        ("rep=2,dp=2,tp=2", {"rep": 2, "dp": 2, "tp": 2}),
        ("pp=1,rep=2,dp=2,cp=1,ep=1,tp=1", {"pp": 1, "rep": 2, "dp": 2, "cp": 1, "ep": 1, "tp": 1}),
        (" 2 x 4 ", {"dp": 2, "tp": 4}),
        (" rep = 2 , dp = 3 ", {"rep": 2, "dp": 3}),
    ],
)
def test_forms_of_a_mesh(text, mesh):
    """Sizes go without names up to three; named axes go in any number; sizes of 1 and blanks are legal."""
    assert parse_mesh(text) == mesh


@given(st.dictionaries(st.sampled_from(["rep", "dp", "tp"]), st.integers(1, 10**6), min_size=1), st.randoms())
@settings(deadline=None)
def test_the_order_is_canonical_whatever_was_typed(mesh, random):
    """Axes come in the order of MESH_AXES, outermost first, in whatever order they were typed."""
    typed = list(mesh.items())
    random.shuffle(typed)
    parsed = parse_mesh(",".join(f"{name}={size}" for name, size in typed))
    assert parsed == mesh
    assert list(parsed) == [name for name in MESH_AXES if name in mesh]
    assert num_ranks(parsed) == num_ranks(mesh)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0x4", no_number("0x4", "0")),
        ("2x", no_number("2x", "an empty size", "tp")),
        ("x2", no_number("x2", "an empty size")),
        ("-1x2", no_number("-1x2", "-1")),
        ("2x2x2x2", f"--mesh 2x2x2x2: 4 sizes, but at most 3 go without names. {FORM}"),
        ("dp=2,dp=2", "--mesh dp=2,dp=2: axis dp is given twice. Name each axis once."),
        ("foo=2", f"--mesh foo=2: no mesh axis is called 'foo'. {NAMES}"),
        ("foo=2,bar=2", f"--mesh foo=2,bar=2: no mesh axis is called 'foo, bar'. {NAMES}"),
        ("DP=2", f"--mesh DP=2: no mesh axis is called 'DP'. {NAMES}"),
        ("dp=2,", f"--mesh dp=2,: no mesh axis is called ''. {NAMES}"),
        ("", no_number("", "an empty size")),
        ("  ", no_number("", "an empty size")),
        ("2X4", no_number("2X4", "2X4")),
        ("2,4", no_number("2,4", "2,4")),
        ("dp=2x4", no_number("dp=2x4", "2x4")),
        ("dp=", no_number("dp=", "an empty size")),
        ("2.0", no_number("2.0", "2.0")),
        ("+2", no_number("+2", "+2")),
        ("1_0", no_number("1_0", "1_0")),
        ("1e3", no_number("1e3", "1e3")),
        ("２x2", no_number("２x2", "２")),
        ("²", no_number("²", "²")),
        ("٣", no_number("٣", "٣")),
        ("tp=2,dp=0", no_number("tp=2,dp=0", "0")),
    ],
)
def test_what_is_no_mesh_is_one_short_message(text, message):
    """Each mistake names the option as typed, the fact, and the cure."""
    with pytest.raises(ValueError) as error:
        parse_mesh(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("cp=2", "cp=2, but context parallelism is not there yet"),
        ("ep=2", "ep=2, but expert parallelism is not there yet"),
    ],
)
def test_axes_that_are_not_there_yet_say_so(text, fact):
    """An axis that is planned is refused above size 1, in words."""
    with pytest.raises(ValueError) as error:
        parse_mesh(text)
    assert str(error.value) == f"--mesh {text}: {fact}. Use pp, rep, dp, tp."


@pytest.mark.parametrize("text", ["9" * 5000, f"2x{'9' * 5000}", f"dp=2,tp={'9' * 5000}"])
def test_a_huge_size_is_refused_in_our_words(text):
    """A size beyond what Python converts is a mistake in --mesh and not an interpreter setting."""
    with pytest.raises(ValueError) as error:
        parse_mesh(text)
    assert str(error.value).startswith("--mesh ")
    assert "sys.set_int_max_str_digits" not in str(error.value)


@given(st.text(alphabet="0123x=,dprtecé ²-+._", max_size=12))
@settings(deadline=None)
def test_any_text_is_a_mesh_or_a_message(text):
    """Whatever is typed is a mesh of sizes of at least 1, or a ValueError that names the option."""
    try:
        mesh = parse_mesh(text)
    except ValueError as error:
        assert str(error).startswith(f"--mesh {text.strip()}")
    else:
        assert mesh and all(name in MESH_AXES and size >= 1 for name, size in mesh.items())


# The number of ranks


@pytest.mark.parametrize(
    ("text", "world", "cure"),
    [
        ("2x3", 4, "--mesh 2x2, or start 6."),
        ("2x2", 6, "--mesh dp=3,tp=2, or start 4."),
        ("8", 4, "--mesh dp=4,tp=1, or start 8."),
        ("rep=2,dp=2,tp=2", 4, "--mesh dp=2,tp=2, or start 8."),
        ("tp=5", 7, "--mesh 7x1, or start 5."),
        ("2", 1, "--mesh dp=1,tp=1, or start 2."),
    ],
)
def test_another_number_of_ranks_than_the_mesh_has_is_an_error(text, world, cure):
    """The message gives the mesh, both numbers, the rule, and a mesh that fits."""
    mesh = parse_mesh(text)
    with pytest.raises(ValueError) as error:
        check_world(text, mesh, world, "torchrun")
    assert str(error.value) == (
        f"--mesh {text}: {num_ranks(mesh)} ranks, but torchrun started {world}. The product of the mesh sizes must be "
        f"the number of ranks. Use {cure}"
    )


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 200))
@settings(deadline=None)
def test_the_mesh_that_a_message_suggests_fits(dp, tp, world):
    """Whoever follows the message has a mesh of the right size; equal numbers pass."""
    mesh = {"dp": dp, "tp": tp}
    if dp * tp == world:
        check_world("typed", mesh, world, "srun")
        return
    with pytest.raises(ValueError) as error:
        check_world("typed", mesh, world, "srun")
    suggested = str(error.value).split("Use --mesh ")[1].split(", or start")[0]
    assert num_ranks(parse_mesh(suggested)) == world


# The mesh that it becomes


def test_a_mesh_names_a_group_for_every_set_of_axes_that_split():
    """Groups are made for each axis and each set of axes with more than one rank, named apart, and for no other."""
    with fake_process_group(12):
        mesh = build_mesh({"rep": 3, "dp": 2, "cp": 1, "tp": 2})
        assert (mesh.axes, mesh.num_ranks, mesh.split_axes()) == (("rep", "dp", "cp", "tp"), 12, ("rep", "dp", "tp"))
        assert mesh.coordinate == (0, 0, 0, 0)
        expected = {c for n in (1, 2, 3) for c in itertools.combinations(("rep", "dp", "tp"), n)}
        assert set(mesh.groups) == expected
        assert len(set(mesh.groups.values())) == len(expected)


def test_the_data_coordinate_counts_rep_and_dp_only():
    """Ranks that differ in tp alone read the same rows; the others are numbered rep-major."""
    sizes = {"rep": 2, "dp": 3, "tp": 2}
    with fake_process_group(12):
        device_mesh = build_mesh(sizes).device_mesh
    seen = {}
    for at in itertools.product(range(2), range(3), range(2)):
        seen[at] = Mesh(device_mesh, sizes, at, {}).data_coordinate(("rep", "dp"))
    assert seen == {(r, d, t): 3 * r + d for r, d, t in seen}
