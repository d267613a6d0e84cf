"""What a program launches, says and moves: against XLA's own count where that is right, else by hand."""

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.analysis.hlo import bytes_moved, collectives, launched

TURNS, ROWS, WIDTH = 6, 64, 256
WEIGHTS = 4 * WIDTH * WIDTH
STREAM = 4 * ROWS * WIDTH


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


def unrolled(x, stack):
    for w in stack:
        x = jnp.tanh(x @ w)
    return x


def scanned(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


ARGUMENTS = ((ROWS, WIDTH), (TURNS, WIDTH, WIDTH))


def test_bytes_moved_without_loops_equal_xlas_count():
    made = compiled(unrolled, *ARGUMENTS)
    assert bytes_moved(made.as_text()) == made.cost_analysis()["bytes accessed"]


def test_a_loop_counts_every_iteration_and_only_the_slice_of_a_stack():
    """XLA counts one turn. In each: a weight read and written by its slice, and read; x through two steps."""
    made = compiled(scanned, *ARGUMENTS)
    least = TURNS * (3 * WEIGHTS + 4 * STREAM)
    assert least <= bytes_moved(made.as_text()) <= 1.05 * least
    assert made.cost_analysis()["bytes accessed"] < 0.3 * least


PROGRAM = """HloModule step

%body (p: (s32[], bf16[8,1024], bf16[4,1024])) -> (s32[], bf16[8,1024], bf16[4,1024]) {
  %p = (s32[], bf16[8,1024]{1,0}, bf16[4,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %all = bf16[8,1024]{1,0} get-tuple-element(%p), index=1
  %x = bf16[4,1024]{1,0} get-tuple-element(%p), index=2
  %one = bf16[1,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%all, %i), kind=kLoop, calls=%slice_of
  %next = bf16[4,1024]{1,0} fusion(%x, %one), kind=kOutput, calls=%write_into
  ROOT %t = (s32[], bf16[8,1024]{1,0}, bf16[4,1024]{1,0}) tuple(%i, %all, %next)
}

%slice_of (a: bf16[8,1024], i: s32[]) -> bf16[1,1024] {
  %a = bf16[8,1024]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %s = bf16[1,1024]{1,0} dynamic-slice(%a, %i.1, %i.1), dynamic_slice_sizes={1,1024}
}

%write_into (b: bf16[4,1024], u: bf16[1,1024]) -> bf16[4,1024] {
  %b = bf16[4,1024]{1,0} parameter(0)
  %u = bf16[1,1024]{1,0:S(1)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %w = bf16[4,1024]{1,0} dynamic-update-slice(%b, %u, %zero, %zero)
}

%condition (p.1: (s32[], bf16[8,1024], bf16[4,1024])) -> pred[] {
  %p.1 = (s32[], bf16[8,1024]{1,0}, bf16[4,1024]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i.2, %limit), direction=LT
}

ENTRY %main (all.1: bf16[8,1024], x.1: bf16[4,1024]) -> bf16[4,1024] {
  %all.1 = bf16[8,1024]{1,0} parameter(0)
  %x.1 = bf16[4,1024]{1,0} parameter(1)
  %zero.1 = s32[] constant(0)
  %start = (s32[], bf16[8,1024]{1,0}, /*index=2*/bf16[4,1024]{1,0}) tuple(%zero.1, %all.1, %x.1)
  %loop = (s32[], bf16[8,1024]{1,0}, bf16[4,1024]{1,0}) while(%start), condition=%condition, body=%body
  %kept = bf16[4,1024]{1,0} get-tuple-element(%loop), index=2
  %sent = (bf16[4,1024]{1,0}, bf16[16,1024]{1,0}) all-gather-start(%kept), dimensions={0}
  %got = bf16[16,1024]{1,0} all-gather-done(%sent)
  %called = bf16[4,1024]{1,0} custom-call(%got, %kept), custom_call_target="tpu_custom_call"
  ROOT %out = bf16[4,1024]{1,0} bitcast(%called)
}
"""
ROW = 2 * 1024


def test_slices_updates_turns_memory_on_the_chip_and_kernels_by_hand():
    """A turn reads a row of the stack and writes one of x: what lies on the chip, `S(1)`, is not counted, and
    the condition's comparison is 4 + 4 + 1 bytes beside the fusion's index of 4."""
    turn = ROW + 4 + ROW + 9
    gather, kernel = (4 + 16) * ROW, (16 + 4 + 4) * ROW
    assert bytes_moved(PROGRAM) == 5 * turn + gather + kernel


def test_an_element_of_a_tuple_is_that_and_not_the_tuple():
    """jax 0.11 prints it as the tuple's name and a number."""
    text = PROGRAM.replace("custom-call(%got, %kept)", "custom-call(%got, %loop#2)")
    assert text != PROGRAM and bytes_moved(text) == bytes_moved(PROGRAM)


@pytest.mark.parametrize(
    ("noted", "turns"),
    [('backend_config={"known_trip_count":{"n":"7"}}', 7), ("", 5)],
    ids=["noted", "compared"],
)
def test_bytes_moved_grow_with_a_loops_trip_count(noted, turns):
    loop = "body=%body\n"
    text = PROGRAM.replace(loop, f"body=%body, {noted}\n")
    assert bytes_moved(text) - bytes_moved(PROGRAM) == (turns - 5) * (2 * ROW + 13)


def test_launches_are_told_apart_by_loop_and_a_collective_is_counted_once():
    """Also one that starts and is done later, whose bytes are those of its result."""
    found, loops = launched(PROGRAM)
    assert [(name, inside) for name, _, inside in found] == [
        ("compare", True),
        ("fusion", True),
        ("fusion", True),
        ("all-gather-start", False),
        ("custom-call", False),
    ]
    assert loops == [False]
    noted = PROGRAM.replace("body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}\n')
    assert launched(noted)[1] == [True]
    reduced = [
        f"  %{name} = bf16[4,1024]{{1,0}} {name}(%kept), to_apply=%add\n"
        for name in ("all-reduce-start", "all-reduce")
    ]
    text = PROGRAM.replace("  %sent", "".join(reduced) + "  %sent")
    assert collectives(text) == {"all-gather": (1, 16 * ROW), "all-reduce": (2, 2 * 4 * ROW)}
