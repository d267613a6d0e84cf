"""Plans of the KV cache, as data: where each row comes from, and which layers read it.

A *row* is what the cache stores for one token and is read by one or more layers. A `KVPlan` lists the rows
and says which row each layer reads. Every method in this library is such a list. A `Prediction` says from
which rows of another, smaller model a prompt's rows are predicted.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

from swiftkv_jax.common.checks import integer
from swiftkv_jax.common.errors import UsageError

SELF, ENCODER = "self", "encoder"  # the spaces of rows: of the tokens themselves, of an encoder's output
PLAIN_FORMS = ("kv", "latent")  # forms of rows that are not converted; a model has one of them
CHECKPOINT_FORMS = ("kv", "k", "v", "x")  # forms of rows that a checkpoint or a user may name
SERVED = {"x": "hadamard_x"}  # form of a checkpoint's rows -> the form in which an engine stores them


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the cache.

    Attributes:
      source: the layer whose entering hidden states the row is made from, or the name of another stream.
      maker: the layer whose projections make it.
      form: how it is stored and read: a key of `rows.FORMS`.
      shared_norm: the source is normalised by the norm that all such rows share (SwiftKV's `norm_swiftkv`),
        not by the maker's own input norm.
    """

    source: int | str
    maker: int
    form: str = "kv"
    shared_norm: bool = False

    @property
    def space(self) -> str:
        """The row's space: "self" for the model's own tokens, or the name of the stream it is made from."""
        return self.source if isinstance(self.source, str) else SELF


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPlan:
    """The rows of one model's cache and their readers; hashable, so it can be a static argument of `jit`.

    Attributes:
      rows: in the order in which they are made.
      reads: reads[j] is the index of the row that layer j reads; None for a layer without attention.
      cross: the same for cross-attention, whose rows are made from another stream; empty without it.
      merged: all rows share one place in the cache, each overwriting the one before; for measurements only.
      tail: tokens at a prompt's end that run every layer. Their rows, and those of generated tokens, are made
        by the standard plan, with weights of its own. 0, as in the paper: this plan makes all rows.
    """

    rows: tuple[Row, ...]
    reads: tuple[int | None, ...]
    cross: tuple[int, ...] = ()
    merged: bool = False
    tail: int = 0

    def __post_init__(self):
        layers = len(self.reads)
        if not layers:
            raise UsageError("a plan needs at least one layer; reads is empty")
        if self.cross and len(self.cross) != layers:
            raise UsageError(f"cross must name a row for each of {layers} layers, or be empty")
        if {*self.reads, *self.cross} - {None} != set(range(len(self.rows))) or not self.rows:
            raise UsageError(
                f"reads and cross must use every row from 0 to {len(self.rows) - 1}, and no other; "
                f"they are {self.reads} and {self.cross}"
            )
        for number, row in enumerate(self.rows):
            self._check_row(number, row)
        own = [(row.source, row.maker) for row in self.rows if isinstance(row.source, int)]
        if own != sorted(set(own)):
            raise UsageError(f"rows must be listed in the order in which they are made, not {own}")
        if any(row.space != SELF for row in self.rows[: len(own)]):
            raise UsageError("rows of the tokens themselves come first, then those of other streams")
        if len({row.source for row in self.rows if row.shared_norm}) > 1:
            raise UsageError("rows with a shared norm must all be made from the same layer's input")
        if integer("tail", self.tail, 0) and not (self.has_fill and len(self.rows) == len(self.full.rows)):
            stored = f"{dataclasses.replace(self, tail=0).description}, rows of form {', '.join(self.forms)}"
            raise UsageError(f"a tail needs SwiftKV with share 1 and rows of form kv; this is {stored}")

    def _check_row(self, number: int, row: Row) -> None:
        layers, named = len(self.reads), isinstance(row.source, str)
        if not {row.maker, 0 if isinstance(row.source, str) else row.source} <= set(range(layers)):
            raise UsageError(f"row {number}: source and maker must be layers in [0, {layers}), not {row}")
        if named != (number in self.cross) or (named and number in self.reads):
            raise UsageError(f"row {number}: cross-attention reads named sources, self-attention layers")
        if isinstance(row.source, int):
            first = self.readers(number)[0]
            if row.source > first:
                raise UsageError(
                    f"row {number} is made from the input of layer {row.source}, but layer {first} reads it"
                )
            if row.source != row.maker and not row.shared_norm:
                raise UsageError(
                    f"row {number} is made from the input of layer {row.source} by layer {row.maker}: "
                    "it needs shared_norm=True, since no layer's own norm fits it"
                )

    @classmethod
    def from_rows(cls, rows, split: int | None = None) -> "KVPlan":
        """Any map from layers to rows: layer j reads row rows[j], which the first layer to read it makes.

        Rows of makers from `split` on are made from the input of layer `split`, after the shared norm.
        `split` defaults to no split. Rows are renumbered in the order of their first readers. A layer whose
        row is None reads none: it has no attention.
        """
        rows = tuple(None if row is None else int(row) for row in rows)
        if not rows:
            raise UsageError("a plan needs at least one layer; rows is empty")
        split = len(rows) if split is None else split
        if not 1 <= split <= len(rows):
            raise UsageError(f"split must be in [1, {len(rows)}] for {len(rows)} layers, not {split}")
        first = {row: layer for layer, row in reversed(list(enumerate(rows))) if row is not None}
        makers = sorted(first.values())
        return cls(
            rows=tuple(Row(min(maker, split), maker, shared_norm=maker >= split) for maker in makers),
            reads=tuple(None if row is None else makers.index(first[row]) for row in rows),
        )

    @classmethod
    def standard(cls, num_layers: int, without: Iterable[int] = ()) -> "KVPlan":
        """Every layer makes and reads its own row, but for the layers `without` attention."""
        return cls.from_rows(None if layer in set(without) else layer for layer in range(num_layers))

    @classmethod
    def swiftkv(
        cls, num_layers: int, split: int, share: int = 1, without: Iterable[int] = (), tail: int = 0
    ) -> "KVPlan":
        """SwiftKV at `split`; AcrossKV when `share` > 1 (SwiftKV paper, sections 3.2 and 3.3).

        Layers from `split` on read rows in consecutive groups of `share`; the last group may be shorter. The
        layers `without` attention read none, and count in no group.
        """
        if share < 1:
            raise UsageError(f"share must be at least 1, not {share}")
        if not 1 <= split <= num_layers:
            raise UsageError(f"split must be in [1, {num_layers}] for {num_layers} layers, not {split}")
        without = set(without)
        upper = [layer for layer in range(split, num_layers) if layer not in without]
        if not upper and split < num_layers:
            raise UsageError(
                f"no layer from split {split} of {num_layers} on has attention: choose a lower split"
            )
        leaders = {layer: upper[i - i % share] for i, layer in enumerate(upper)}
        rows = (None if layer in without else leaders.get(layer, layer) for layer in range(num_layers))
        return dataclasses.replace(cls.from_rows(rows, split), tail=tail)

    @classmethod
    def merge_all(cls, num_layers: int) -> "KVPlan":
        """Full depth, all projections computed, one row stored (paper section 5.1); for measurements only."""
        return dataclasses.replace(cls.standard(num_layers), merged=True)

    def stored_as(self, *forms: str) -> "KVPlan":
        """This plan with the rows of its own tokens in another form: one form for all, or one for each.

        Rows that store the same inputs (form "x" with the shared norm) are merged into one: SwiftKV's upper
        layers then all read it, each by its own projections.
        """
        own = self.own.rows
        each = _one_each(forms, len(own), "rows")
        made = tuple(dataclasses.replace(row, form=form) for row, form in zip(own, each, strict=True))
        made += self.rows[len(own) :]
        same = [row for row in made if row.form == "x" and row.shared_norm]
        kept = [row for row in made if row not in same[1:]]
        moved = [kept.index(same[0] if row in same else row) for row in made]
        reads = tuple(None if read is None else moved[read] for read in self.reads)
        cross = tuple(moved[read] for read in self.cross)
        return dataclasses.replace(self, rows=tuple(kept), reads=reads, cross=cross)

    @property
    def served(self) -> "KVPlan":
        """This plan with each row in the form in which an engine stores it (see SERVED)."""
        return self._renamed(SERVED)

    @property
    def named(self) -> "KVPlan":
        """This plan with each row in the form that a checkpoint names: the plan that `served` was made of."""
        return self._renamed({served: form for form, served in SERVED.items()})

    def _renamed(self, names: Mapping[str, str]) -> "KVPlan":
        rows = (dataclasses.replace(row, form=names.get(row.form, row.form)) for row in self.rows)
        return dataclasses.replace(self, rows=tuple(rows))

    def with_cross(self, *forms: str) -> "KVPlan":
        """This plan with cross-attention: every layer also reads an encoder's output.

        The forms of its rows are one for all layers, or one for each. A row of keys or values is made by its
        layer. Inputs are the same for all layers, which share one row of them (Slim attention's E-cache).
        """
        own, layers = self.own, self.num_layers
        each = _one_each(forms or ("kv",), layers, "layers")
        first = each.index("x") if "x" in each else 0
        makers = [j for j, form in enumerate(each) if form != "x" or j == first]
        reads = [makers.index(first if form == "x" else j) for j, form in enumerate(each)]
        made = tuple(Row(ENCODER, j, each[j]) for j in makers)
        cross = tuple(len(own.rows) + read for read in reads)
        return dataclasses.replace(own, rows=own.rows + made, cross=cross)

    @property
    def own(self) -> "KVPlan":
        """The plan without cross-attention."""
        own = tuple(row for row in self.rows if row.space == SELF)
        return dataclasses.replace(self, rows=own, cross=())

    @property
    def full(self) -> "KVPlan":
        """The standard plan of the same layers, with rows that are not converted."""
        return KVPlan.standard(self.num_layers, self.without).stored_as(
            self.forms[0] if self.is_plain else "kv"
        )

    @property
    def of_tail(self) -> "KVPlan":
        """The plan of the tokens that run every layer: the standard one, if there is a `tail`."""
        return self.full if self.tail else self

    @property
    def is_plain(self) -> bool:
        """Whether no row is converted to another form than those of the published model."""
        return self.forms in [(form,) for form in PLAIN_FORMS]

    @property
    def without(self) -> tuple[int, ...]:
        """The layers without attention."""
        return tuple(layer for layer, read in enumerate(self.reads) if read is None)

    def read_by(self, layer: int) -> tuple[int, ...]:
        """The rows that a layer reads: by its attention, if it has one, then by its cross-attention."""
        own = self.reads[layer]
        return () if own is None else (own, *self.cross[layer : layer + 1])

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.reads)

    @property
    def num_rows(self) -> int:
        """Rows that are stored."""
        return 1 if self.merged else len(self.rows)

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of the tokens' own rows, in the order of their first rows."""
        return self.forms_of(SELF)

    @property
    def cross_forms(self) -> tuple[str, ...]:
        """The form of the row that each layer's cross-attention reads."""
        return tuple(self.rows[row].form for row in self.cross)

    def forms_of(self, space: str) -> tuple[str, ...]:
        """The forms of a space's rows, in the order of their first rows."""
        return tuple(dict.fromkeys(row.form for row in self.rows if row.space == space))

    @property
    def depth(self) -> int:
        """Number of layers that every token must run: up to the deepest source of any row."""
        return self.deepest(range(len(self.rows)))

    def deepest(self, rows: Iterable[int]) -> int:
        """The deepest layer whose input one of these rows is made from."""
        sources = [self.rows[row].source for row in rows]
        return max(source for source in sources if isinstance(source, int))

    @property
    def split(self) -> int:
        """The layer whose input the rows with a shared norm are made from; `num_layers` without such rows."""
        sources = [row.source for row in self.rows if row.shared_norm and isinstance(row.source, int)]
        return sources[0] if sources else self.num_layers

    @property
    def has_fill(self) -> bool:
        """Whether a fused fill can make some rows: a SwiftKV plan's upper ones, of form "kv"."""
        return self.has_shared_norm and self.forms == ("kv",)

    @property
    def has_shared_norm(self) -> bool:
        """Whether some rows are made from the input of layer `split`, after a norm that they share."""
        return any(row.shared_norm for row in self.rows)

    @property
    def is_swiftkv(self) -> bool:
        """Whether checkpoints call this a SwiftKV model. Other code should ask for the property it needs: a
        shared norm, rows to fill, or skipped layers."""
        return self.has_shared_norm

    @property
    def skipped_layers(self) -> int:
        """Number of layers from `split` on, which only a prompt's last token runs."""
        return self.num_layers - self.split

    @property
    def kind(self) -> str:
        """The method's name."""
        return "SwiftKV" if self.has_shared_norm else "standard"

    @property
    def description(self) -> str:
        """The plan in a few words."""
        said = f"{self.kind}, {self.num_layers} layers"
        if not self.skipped_layers:
            return said
        most = max(len(self.readers(row)) for row in range(len(self.rows)))
        return f"{said}, split {self.split}, share {most}" + (f", tail {self.tail}" if self.tail else "")

    def made_at(self, layer: int) -> tuple[int, ...]:
        """The rows made from the hidden states that enter `layer`."""
        return tuple(i for i, row in enumerate(self.rows) if row.source == layer)

    def readers(self, row: int) -> tuple[int, ...]:
        """The layers that read `row`: by cross-attention, if it is made from another stream."""
        reads = self.reads if self.rows[row].space == SELF else self.cross
        return tuple(layer for layer, read in enumerate(reads) if read == row)

    def name(self, row: int) -> str:
        """The row's name in messages."""
        crossing = "" if self.rows[row].space == SELF else "'s cross-attention"
        return f"layer {self.rows[row].maker}{crossing}"

    def place(self, row: int) -> int:
        """Index of `row` among the stored rows of its form and space."""
        kind = self.rows[row].form, self.rows[row].space
        return 0 if self.merged else sum((other.form, other.space) == kind for other in self.rows[:row])

    def stored(self, form: str, space: str = SELF) -> int:
        """How many rows of `form` are stored in a space."""
        count = sum((row.form, row.space) == (form, space) for row in self.rows)
        return min(count, 1) if self.merged else count

    def makes_own(self, layer: int) -> bool:
        """Whether `layer` makes one row from its own normalised input, and is the only one to read it."""
        row = self.reads[layer]
        if row is None or self.made_at(layer) != (row,) or self.readers(row) != (layer,):
            return False
        return not self.rows[row].shared_norm

    def runs(self, kinds: Sequence[Hashable], tables: Sequence[Hashable] = ()) -> tuple[range, ...]:
        """The longest ranges of equal layers, cut where rows are made together.

        Layers are equal if they are of one kind (`kinds`, of all layers: see `ModelConfig.kinds`), read rows
        of the same form (also in cross-attention) that one rotary table turns (`tables`, of all makers; empty
        if there is one), and either all make their own row or make none.
        """

        def kind(layer: int):
            rows = [self.rows[row] for row in self.read_by(layer)]
            table = tables[rows[0].maker] if tables and rows else None
            return self.makes_own(layer), [row.form for row in rows], table, kinds[layer]

        starts = [0]
        for layer in range(1, self.num_layers):
            together = self.made_at(layer) and not self.makes_own(layer)
            if together or kind(layer) != kind(layer - 1):
                starts.append(layer)
        return tuple(range(a, b) for a, b in zip(starts, [*starts[1:], self.num_layers], strict=True))

    @property
    def split_and_share(self) -> tuple[int, int]:
        """(split, share), if the published config.json can express this plan, whatever its rows' forms.

        Raises:
          UsageError: another map from layers to rows, or merge-all: config.json cannot describe these.
        """
        return self._listed()[:2]

    @property
    def listed_forms(self) -> tuple[str, ...]:
        """The forms from which `stored_as` makes this plan, one for each row of the plain SwiftKV plan:
        `KVPlan.swiftkv(layers, *split_and_share, without, tail).stored_as(*listed_forms)` is this plan.

        Raises:
          UsageError: as `split_and_share`.
        """
        return self._listed()[2]

    def _listed(self) -> tuple[int, int, tuple[str, ...]]:
        own, layers = self.named.own, self.num_layers
        for share in range(1, layers - self.split + 2):
            plain = KVPlan.swiftkv(layers, self.split, share, self.without, self.tail)
            firsts = [plain.readers(row)[0] for row in range(len(plain.rows))]
            forms = tuple(own.rows[own.read_by(layer)[0]].form for layer in firsts)
            if plain.stored_as(*forms) == own:
                return self.split, share, forms
        raise UsageError(
            f"this plan (layers read rows {self.reads}, split {self.split}) has no "
            "num_key_value_layers/key_value_group_size form; only plans of KVPlan.standard and "
            "KVPlan.swiftkv can be saved"
        )


def _one_each(forms: tuple[str, ...], count: int, what: str) -> tuple[str, ...]:
    """One form for each of `count` rows or layers; `forms` has one for all, or one for each."""
    if len(forms) not in (1, count):
        raise UsageError(f"{len(forms)} forms for {count} {what}; give one for all, or one each")
    for form in set(forms) & set(SERVED.values()):
        raise UsageError(f"rows have no form {form!r}; known: {', '.join(CHECKPOINT_FORMS)}")
    return forms * count if len(forms) == 1 else forms


@dataclasses.dataclass(frozen=True)
class Prediction:
    """KV prediction: which rows of an auxiliary model a base model's rows are predicted from.

    It maps rows, not layers, so either model may be standard, SwiftKV or AcrossKV. Hashable, so it can be a
    static argument of `jit`.

    Attributes:
      reads: row r of the base's plan is predicted from row reads[r] of the auxiliary's plan.
      tail: tokens at a prompt's end that the base reads itself, with rows of its own; the paper has 1.
    """

    reads: tuple[int, ...]
    tail: int = 1

    def __post_init__(self):
        if not self.reads:
            raise UsageError("reads is empty: it needs a row of the auxiliary for each row of the base")
        for row, read in enumerate(self.reads):
            integer(f"reads[{row}]", read, 0)
        integer("tail", self.tail, 1)

    @classmethod
    def spread(cls, base_rows: int, aux_rows: int, tail: int = 1) -> "Prediction":
        """Neighbouring rows of the base share one of the auxiliary (KV prediction paper, Table 1: C).

        With base_rows = q * aux_rows + r, the first r rows of the auxiliary serve q + 1 rows each, the others
        q.
        """
        each, more = divmod(integer("base_rows", base_rows, 1), integer("aux_rows", aux_rows, 1))
        served = (each + (row < more) for row in range(aux_rows))
        return cls(tuple(row for row, count in enumerate(served) for _ in range(count)), tail)

    @classmethod
    def nearest(cls, base_rows: int, kept: Sequence[int], tail: int = 1) -> "Prediction":
        """The map for an auxiliary that has some of the base's own rows (KV prediction paper, Table 1: LP).

        Each row is predicted from the nearest one at or below it that is among `kept`, rows below all of them
        from the first.
        """
        kept = ascending("kept", kept, integer("base_rows", base_rows, 1))
        below = (sum(row >= other for other in kept) for row in range(base_rows))
        return cls(tuple(max(0, count - 1) for count in below), tail)


def ascending(name: str, numbers: Sequence[int], count: int) -> tuple[int, ...]:
    """`numbers` if they are some of range(count), each once and in order.

    Raises:
      UsageError: they are not, or there are none.
    """
    chosen = tuple(integer(f"{name}[{i}]", number, 0, count - 1) for i, number in enumerate(numbers))
    if not chosen or chosen != tuple(sorted(set(chosen))):
        raise UsageError(f"{name} must list some of 0 to {count - 1} in ascending order, not {list(chosen)}")
    return chosen
