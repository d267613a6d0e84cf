"""Names of kernels as a user gives them: NAME for every operation that has it, or operation=NAME."""

from swiftkv_jax.common.errors import UsageError, suggest
from swiftkv_jax.kernels.causal_attention.api import CAUSAL_ATTENTION
from swiftkv_jax.kernels.fused_kv_fill.api import FUSED_KV_FILL
from swiftkv_jax.kernels.page_write.api import PAGE_WRITE
from swiftkv_jax.kernels.paged_attention.api import PAGED_ATTENTION

AUTO, SAFE = "auto", "xla"  # of `kernels`: as checked on this machine; the safe ones
SCORING = {name: CAUSAL_ATTENTION[name] for name in ("reference", "xla", "cudnn")}
OPERATIONS = {  # as `kernels` calls them; "attention" is decode and chunk
    "decode": PAGED_ATTENTION,
    "chunk": PAGED_ATTENTION,
    "fill": FUSED_KV_FILL,
    "write": PAGE_WRITE,
    "scoring": SCORING,
}


def named(text: str) -> tuple[dict[str, str], set[str]]:
    """Parse "NAME,operation=NAME,...": return (operation -> implementation, the operations that were named).

    An entry for one operation overrides an entry for all; of two such entries the first counts.
    """
    whole: dict[str, str] = {}
    own: dict[str, str] = {}
    for part in text.split(","):
        operation, said, name = (word.strip() for word in part.rpartition("="))
        if not said and name == AUTO:
            continue  # the default of what is not named
        if not said:
            having = [known for known, table in OPERATIONS.items() if name in table]
            if not having:
                every = [AUTO, *dict.fromkeys(n for table in OPERATIONS.values() for n in table)]
                raise UsageError(
                    f"kernels: no operation has {name!r}: {', '.join(every)}{suggest(name, every)}"
                )
            whole = dict.fromkeys(having, name) | whole
            continue
        meant = ("decode", "chunk") if operation == "attention" else (operation,)
        if meant[0] not in OPERATIONS:
            every = ("attention", *OPERATIONS)
            raise UsageError(
                f"kernels: no operation {operation!r}: {', '.join(every)}{suggest(operation, every)}"
            )
        table = OPERATIONS[meant[0]]
        if name not in table:
            raise UsageError(
                f"kernels: {operation} has no {name!r}; it has {', '.join(table)}{suggest(name, table)}"
            )
        own = dict.fromkeys(meant, name) | own
    return whole | own, set(own)
