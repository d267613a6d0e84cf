"""Training checkpoints: bit-exact, and every damage noticed."""

import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from back_to_back import state_at
from jax.sharding import NamedSharding, PartitionSpec
from saved_states import bits, files_of, restored, saved, shapes_of

from swiftkv_jax.checkpoint import manifest
from swiftkv_jax.checkpoint.training import Checkpointer
from swiftkv_jax.common.errors import UsageError
from swiftkv_jax.core.pytree import pytree
from swiftkv_jax.core.shapes import PyTree


@pytree
class RunState:
    params: PyTree
    opt: PyTree


def run_state():
    """A trainer's state, including values that are easily lost: NaN payloads, subnormals, empty arrays."""
    rng = np.random.default_rng(0)

    def anything(kind, *shape):
        raw = rng.integers(0, 256, (*shape, jnp.dtype(kind).itemsize), np.uint8)
        return jnp.asarray(raw.view(jnp.dtype(kind))[..., 0])

    params = {
        "half": anything(jnp.bfloat16, 5, 24),
        "eighth": anything(jnp.float8_e4m3fn, 7),
        "full": anything(jnp.float32, 3, 57),
        "bytes": anything(jnp.int8, 11),
        "none": jnp.zeros((0, 20), jnp.bfloat16),
        "flag": jnp.array([True, False]),
        "scalar": jnp.float32(-0.0),
    }
    weights = {"a": params["full"], "b": [params["half"], params["none"]]}
    opt = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), {"a": True, "b": False})
    )
    return RunState({"w": params}, opt.init(weights))


def test_round_trip_is_bit_exact(tmp_path):
    state, meta = (
        run_state(),
        {"data": {"epoch": 1, "order": [3, 1, 2]}, "best": 1.25, "versions": {"jax": "x"}},
    )
    with Checkpointer(tmp_path / "new" / "ckpt") as checkpointer:
        assert checkpointer.restore(shapes_of(state)) is None
        checkpointer.save(12, state, meta)
    for abstract in (shapes_of(state), state):
        with Checkpointer(tmp_path / "new" / "ckpt") as checkpointer:
            step, got, got_meta = checkpointer.restore(abstract)
        assert (step, got_meta) == (12, meta)
        assert bits(got) == bits(state)
        assert jax.tree.structure(got) == jax.tree.structure(state)


def test_a_saved_state_may_be_donated_right_after_save(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.5 + 1, tree), donate_argnums=0)
    state = {str(i): jax.random.normal(jax.random.key(i), (512, 512)) for i in range(6)}
    want = {name: np.array(leaf, copy=True) for name, leaf in state.items()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(20):
            state = update(state)
        jax.block_until_ready(state)
        _, got, _ = checkpointer.restore(shapes_of(state))
    assert bits(got) == bits(want)


def test_restores_into_other_shardings(tmp_path):
    mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    place = {
        "w": NamedSharding(mesh, PartitionSpec(None, "fsdp")),
        "none": NamedSharding(mesh, PartitionSpec("fsdp")),
    }
    rows = 2 * len(jax.devices())
    state = {"w": jnp.arange(4.0 * rows).reshape(4, rows), "none": jnp.zeros((0, 3))}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, jax.device_put(state, place | {"w": NamedSharding(mesh, PartitionSpec())}), {})
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, place)
        _, got, _ = checkpointer.restore(abstract)
    assert bits(got) == bits(state)
    for name, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(place[name], leaf.ndim), name


def test_every_flipped_byte_is_noticed(tmp_path):
    saved(tmp_path, [10, 20])
    rng = random.Random(0)
    files = files_of(tmp_path / "20")
    assert {"manifest.json", "_CHECKPOINT_METADATA", "metadata", "manifest.ocdbt"} <= {p.name for p in files}
    for i in range(max(50, len(files))):  # every file at least once, the manifest among them
        path = files[i % len(files)]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= rng.choice([1 << rng.randrange(8), rng.randrange(1, 256)])
        path.write_bytes(bad)
        step, lines = restored(tmp_path)
        assert step == 10 and len(lines) == 1, path
        assert f"checkpoint 20 rejected: {path.relative_to(tmp_path / '20')}: " in lines[0]
        path.write_bytes(good)
    assert restored(tmp_path) == (20, [])


@pytest.mark.slow
def test_every_truncated_or_missing_file_is_noticed(tmp_path):
    saved(tmp_path, [10, 20])
    for path in files_of(tmp_path / "20"):
        good = path.read_bytes()
        for size in {0, len(good) // 2, len(good) - 1}:
            path.write_bytes(good[:size])
            assert restored(tmp_path)[0] == 10, (path, size)
        path.unlink()
        step, lines = restored(tmp_path)
        assert step == 10 and path.name in lines[0] and "missing" in lines[0]
        path.write_bytes(good)
    shutil.rmtree(tmp_path / "20" / "state")
    assert restored(tmp_path)[0] == 10
    shutil.rmtree(tmp_path / "20")
    (tmp_path / "20").mkdir()
    assert restored(tmp_path)[0] == 10


def test_every_byte_of_the_manifest_counts(tmp_path):
    folder = saved(tmp_path, [3]) / "3"
    good = (folder / "manifest.json").read_bytes()
    assert manifest.fault(folder, 3) is None
    for at in range(len(good)):
        (folder / "manifest.json").write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert manifest.fault(folder, 3) == "manifest.json: damaged", at


@pytest.mark.parametrize("name", ["../10/meta/metadata", "/etc/hostname"])
def test_manifest_cannot_point_outside(tmp_path, name):
    saved(tmp_path, [10, 20])
    (tmp_path / "20" / "manifest.json").write_bytes(manifest._encode(20, {name: [1, "0"]}))
    step, lines = restored(tmp_path)
    assert step == 10 and "outside" in lines[0]


def test_a_checkpoint_renamed_to_another_step_is_rejected(tmp_path):
    saved(tmp_path, [10, 20])
    (tmp_path / "20").rename(tmp_path / "30")
    step, lines = restored(tmp_path)
    assert step == 10 and lines == ["checkpoint 30 rejected: manifest.json: it is of step 20"]


def test_step_killed_before_its_manifest_is_replaced(tmp_path):
    saved(tmp_path, [10, 20])
    (tmp_path / "20" / "manifest.json").unlink()
    (tmp_path / "30.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "30.orbax-checkpoint-tmp" / "junk").write_text("half")
    step, lines = restored(tmp_path)
    assert step == 10 and lines == ["checkpoint 20 rejected: manifest.json: missing, the save was cut short"]
    saved(tmp_path, [20])
    assert restored(tmp_path) == (20, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "20"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_keeps_the_newest(tmp_path, keep):
    with Checkpointer(tmp_path, keep=keep) as checkpointer:
        for n, step in enumerate([3, 5, 8, 13, 21], start=1):
            checkpointer.save(step, state_at(step), {"step": step})
            checkpointer.wait()
            assert checkpointer.steps() == [3, 5, 8, 13, 21][max(0, n - keep) : n]
    assert restored(tmp_path) == (21, [])


def test_rejected_steps_do_not_count_as_kept(tmp_path):
    saved(tmp_path, [1, 2, 3])
    (tmp_path / "3" / "meta" / "metadata").write_text("{}")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.restore(shapes_of(state_at(0)), report=lambda line: None)[0] == 2
        checkpointer.save(4, state_at(4), {"step": 4})
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]  # two good ones
        checkpointer.save(5, state_at(5), {"step": 5})
        checkpointer.wait()
        assert checkpointer.steps() == [4, 5]


def test_rejected_step_is_saved_again(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "2" / "meta" / "metadata").write_text("{}")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.restore(shapes_of(state_at(0)), report=lambda line: None)
        checkpointer.save(1, state_at(1), {})  # just restored: nothing to do
        checkpointer.save(2, state_at(2), {"step": 2})
        checkpointer.save(2, state_at(2), {})  # just saved
    assert restored(tmp_path) == (2, [])


def test_old_steps_go_only_after_the_new_manifest(tmp_path, monkeypatch):
    write, seen = manifest.write, []

    def watched(folder, step):
        seen.append((step, restored(tmp_path)[0] if step > 1 else None))
        write(folder, step)

    monkeypatch.setattr(manifest, "write", watched)
    saved(tmp_path, [1, 2, 3], keep=1)
    assert seen == [(1, None), (2, 1), (3, 2)]


def test_other_runs_checkpoints_are_not_overwritten(tmp_path):
    saved(tmp_path, [10, 20])
    for step in (5, 10, 20):
        with pytest.raises(UsageError):
            Checkpointer(tmp_path).save(step, state_at(step), {})
    assert restored(tmp_path) == (20, [])


def test_other_model_is_refused(tmp_path):
    state = {"w": jnp.ones((4, 6)), "opt": {str(i): jnp.zeros(i + 1) for i in range(13)}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, {})
        for other, words in [
            ({"w": jnp.ones((4, 8))}, "w (float32[4, 6] saved, float32[4, 8] here)"),
            ({"w": jnp.ones((4, 6), jnp.bfloat16)}, "w (float32[4, 6] saved, bfloat16[4, 6] here)"),
            ({"v": jnp.ones(1)}, "v (nothing saved, float32[1] here)"),
            ({"none": jnp.ones((0, 2))}, "none (nothing saved, float32[0, 2] here)"),
            ({"opt": {}}, "opt/0 (float32[1] saved, nothing here)"),
        ]:
            with pytest.raises(UsageError, match="another model or optimiser") as caught:
                checkpointer.restore(state | other)
            assert words in str(caught.value) and "\n" not in str(caught.value)
        assert str(caught.value).count("nothing here") == 10 and "and 3 more" in str(caught.value)
        assert bits(checkpointer.restore(state)[1]) == bits(state)
