"""The `quantization_config` of a published config.json: whether its weights are in a format that is read."""

from collections.abc import Mapping

from swiftkv_jax.common import checks
from swiftkv_jax.common.errors import UsageError

FIELDS = ("quantization_config", "compression_config")
# quantization= of `from_pretrained` -> the dtype that weights have then.
DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
CHOICES = (None, "auto", "dequantize", *DTYPES)
_BLOCK = 128
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "dense")
_READ = (
    "read are fp8, fbgemm_fp8, modelopt's FP8, and compressed-tensors' int-quantized, float-quantized and "
    "mxfp4-pack-quantized: take such a checkpoint, or the one that this was made from"
)


def checked(value: str | None) -> str:
    """A user's `quantization`; None is "auto".

    Raises:
      UsageError: another value than those of `CHOICES`.
    """
    return checks.choice("quantization", value, CHOICES) or "auto"


def block_of(raw: Mapping) -> tuple[int, int]:
    """(outputs, inputs) of a block of a checkpoint's weights that has one scale, if its scales are of blocks.

    raw: the fields of config.json.

    Raises:
      UsageError: the weights are quantised in a way that is not read.
    """
    name = next((name for name in FIELDS if raw.get(name)), None)
    if name is None:
        return _BLOCK, _BLOCK
    said, where = raw[name], f"config.json: {name}"
    if not isinstance(said, Mapping):
        raise UsageError(f"{where} must be an object, not {said!r:.60}")
    method, block = said.get("quant_method"), said.get("weight_block_size")
    if method == "compressed-tensors":
        groups = said.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, Mapping) else []
        formats = [said, *groups, said.get("sparsity_config")]
        for format in [each.get("format") for each in formats if isinstance(each, Mapping)]:
            if format is not None and format not in _FORMATS:
                raise UsageError(f"{where}: format {format!r:.60} is not read; {_READ}")
        weights = [group.get("weights") for group in groups if isinstance(group, Mapping)]
        for each in [each for each in weights if isinstance(each, Mapping)]:
            bad = [
                f
                for f, fine in (("symmetric", (True, None)), ("actorder", (None, False)))
                if each.get(f) not in fine
            ]
            if bad:
                raise UsageError(f"{where}: weights with {bad[0]} {each[bad[0]]!r:.60} are not read; {_READ}")
            group = (1, each.get("group_size")) if each.get("strategy") == "group" else None
            block = each.get("block_structure") or group or block
    elif method == "modelopt":
        if said.get("quant_algo") != "FP8":
            raise UsageError(f"{where}: quant_algo {said.get('quant_algo')!r:.60} is not read; {_READ}")
    elif method not in ("fp8", "fbgemm_fp8"):
        raise UsageError(f"{where}: quant_method {method!r:.60} is not read; {_READ}")
    if block is None:
        return _BLOCK, _BLOCK
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise UsageError(f"{where}: a block of weights must be two sizes, not {block!r:.60}")
    outputs, inputs = (checks.integer(f"{where}: the size of a block", size, 1) for size in block)
    return outputs, inputs
