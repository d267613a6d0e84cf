"""Run by test_hf.py with 8 virtual devices: load a folder over several meshes, and say what was read.

    python mesh_load.py FOLDER

Prints one JSON object: the largest number of values read at once, for each mesh. Fails where a value or
its place is wrong.
"""

import json
import sys

import jax
import numpy as np

from swiftkv_jax.checkpoint import hf
from swiftkv_jax.core import weights
from swiftkv_jax.core.sharding import make_mesh

MESHES = [(1, 8, 1), (2, 2, 2), (1, 1, 8), (8, 1, 1)]


def check_places(got, abstract) -> None:
    places = [jax.tree.map(lambda x: x.sharding, tree) for tree in (got, abstract)]
    assert places[0] == places[1], "an array lies where sharding.py does not say"


def main(folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    model, want = hf.from_pretrained(folder)
    _, eight = hf.from_pretrained(folder, quantization="int8")
    read, sizes = hf._read, []

    def measured(*arguments, **named):
        piece = read(*arguments, **named)
        sizes.append(piece.size)
        return piece

    hf._read = measured
    largest = {}
    for axes in MESHES:
        mesh = make_mesh(*axes)
        sizes.clear()
        _, got = hf.from_pretrained(folder, mesh=mesh)
        largest[str(axes)] = max(sizes)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)
        check_places(got, weights.abstract(model.config, model.plan, np.float32, mesh))
        _, got = hf.from_pretrained(folder, mesh=mesh, quantization="int8")  # scales lie with their outputs
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, eight)
        check_places(got, weights.abstract(model.config, model.plan, np.float32, mesh, eight_bit="int8"))
    print(json.dumps(largest))


main(sys.argv[1])
