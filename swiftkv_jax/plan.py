"""Where does a row of the cache come from? The answer, as data.

A *row* is one set of keys and values in the cache. A `KVPlan` says which row each layer reads, which
layers project keys and values (the makers), and how deep the stream may be that they are made from.
"""

import dataclasses

from swiftkv_jax.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPlan:
    """Rows, makers and split of one model; hashable, so it can be a static argument of `jit`.

    Attributes:
      rows: rows[j] is the cache row that layer j reads.
      makers: layers that own k and v projections, ascending; maker m writes rows[m].
      split: a maker m >= split projects the stream entering layer `split`, after one shared
        RMSNorm (`norm_swiftkv`); a maker below it projects its own layer's normalised input.
        `split == num_layers` is the plain transformer.
    """

    rows: tuple[int, ...]
    makers: tuple[int, ...]
    split: int

    def __post_init__(self):
        layers = len(self.rows)
        if not layers:
            raise UsageError("a plan needs at least one layer; rows is empty")
        if not 1 <= self.split <= layers:
            raise UsageError(f"split must be in [1, {layers}] for {layers} layers, not {self.split}")
        if sorted(set(self.rows)) != list(range(self.num_rows)):
            raise UsageError(f"rows must use every number from 0 to {self.num_rows - 1}, not {self.rows}")
        if list(self.makers) != sorted(set(self.makers)) or not set(self.makers) <= set(range(layers)):
            raise UsageError(f"makers must be ascending layers in [0, {layers}), not {self.makers}")
        owners = {row: layer for layer, row in reversed(list(enumerate(self.rows)))}
        orphans = sorted(row for row, owner in owners.items() if owner not in self.makers)
        if orphans:
            raise UsageError(
                f"rows {orphans} are read before any layer has made them: their first readers are no makers"
            )

    @classmethod
    def from_rows(cls, rows, split: int | None = None) -> "KVPlan":
        """Any row map: the first layer to read a row makes it. `split` defaults to no split."""
        rows = tuple(int(row) for row in rows)
        makers = tuple(sorted({row: layer for layer, row in reversed(list(enumerate(rows)))}.values()))
        return cls(rows=rows, makers=makers, split=len(rows) if split is None else split)

    @classmethod
    def standard(cls, num_layers: int) -> "KVPlan":
        """Every layer makes and reads its own row."""
        return cls.from_rows(range(num_layers))

    @classmethod
    def swiftkv(cls, num_layers: int, split: int, share: int = 1) -> "KVPlan":
        """SwiftKV at `split`; AcrossKV when `share` > 1 (SwiftKV paper, sections 3.2 and 3.3).

        Layers from `split` on read rows in consecutive groups of `share`; the last group may be shorter.
        """
        if share < 1:
            raise UsageError(f"share must be at least 1, not {share}")
        if not 1 <= split <= num_layers:
            raise UsageError(f"split must be in [1, {num_layers}] for {num_layers} layers, not {split}")
        upper = (split + (layer - split) // share for layer in range(split, num_layers))
        return cls.from_rows((*range(split), *upper), split)

    @classmethod
    def merge_all(cls, num_layers: int) -> "KVPlan":
        """Full depth, every projection computed, one row stored (paper section 5.1): for measuring only."""
        return cls(rows=(0,) * num_layers, makers=tuple(range(num_layers)), split=num_layers)

    @property
    def num_layers(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        return max(self.rows) + 1

    @property
    def is_swiftkv(self) -> bool:
        """Whether some rows are made from the stream entering `split` instead of their own layer's."""
        return any(maker >= self.split for maker in self.makers)

    @property
    def depth(self) -> int:
        """Layers every token must run: up to the deepest stream that any row is made from."""
        return max(min(maker, self.split) for maker in self.makers)

    @property
    def lower_makers(self) -> tuple[int, ...]:
        """Makers inside the lower layers [0, depth)."""
        return tuple(maker for maker in self.makers if maker < self.depth)

    @property
    def upper_makers(self) -> tuple[int, ...]:
        """Makers whose rows `fill` makes from the stream leaving the lower layers."""
        return tuple(maker for maker in self.makers if maker >= self.depth)

    @property
    def upper_rows(self) -> tuple[int, ...]:
        """The rows that `fill` writes, in the order of `upper_makers`."""
        return tuple(self.rows[maker] for maker in self.upper_makers)

    def owner(self, layer: int) -> int:
        """The maker whose projections fill what `layer` reads."""
        return max(m for m in self.makers if self.rows[m] == self.rows[layer] and m <= layer)

    def group(self, maker: int) -> tuple[int, ...]:
        """The layers that read what `maker` writes: those whose k and v are averaged into it."""
        return tuple(layer for layer in range(self.num_layers) if self.owner(layer) == maker)

    @property
    def stackable(self) -> bool:
        """Whether lower layers each own their row and upper ones read filled rows: a scan can run them."""
        own = self.lower_makers == tuple(range(self.depth)) and len(set(self.rows)) == len(self.makers)
        return own and set(self.rows[self.depth :]) <= set(self.upper_rows)

    @property
    def split_and_share(self) -> tuple[int, int]:
        """(split, share) when the published config.json can express this plan.

        Raises:
          UsageError: an arbitrary row map, or merge-all, which no config.json field describes.
        """
        for share in range(1, self.num_layers - self.split + 2):
            if self == KVPlan.swiftkv(self.num_layers, self.split, share):
                return self.split, share
        raise UsageError(
            f"rows {self.rows} at split {self.split} have no num_key_value_layers/key_value_group_size form; "
            "only plans of KVPlan.standard and KVPlan.swiftkv can be saved"
        )
