"""The baselines by their descriptions, one sequence at a time, in float64 NumPy with sets of positions.

Nothing of the library is used but its parameters' names.
"""

import math

import numpy as np


class Numpy:
    """A model, layer by layer, on dicts from positions to hidden states; of a student, `share` layers from
    `split` on have one row."""

    def __init__(self, config, params, split=None, share=1):
        self.config, self.params = config, params
        self.layers = config.num_layers
        self.split = self.layers if split is None else split
        self.reads = [min(j, self.split) + max(0, j - self.split) // share for j in range(self.layers)]
        self.rows = self.reads[-1] + 1

    def _at(self, stacks, index):
        for stack in stacks:
            size = len(next(iter(leaves(stack))))
            if index < size:
                return cut(stack, index)
            index -= size
        raise IndexError(index)

    def norm(self, x, gain):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps) * wide(gain)

    def turn(self, x, position):
        """Rotary embedding of heads [n, H]."""
        half = x.shape[-1] // 2
        angle = position * self.config.rope.rope_theta ** (-np.arange(half) / half)
        a, b = x[:, :half], x[:, half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1
        )

    def embed(self, token):
        return wide(self.params["embed"])[token]

    def logits(self, x):
        p = self.params
        kernel = wide(p["lm_head"]) if "lm_head" in p else wide(p["embed"]).T
        return self.norm(x, p["norm"]) @ kernel

    def empty(self):
        """The rows: position -> (keys, values) each."""
        return [{} for _ in range(self.rows)]

    def make(self, row, xs, gain, kv):
        c, maker = self.config, self._at(self.params["rows"], row)
        for at, x in xs.items():
            h = self.norm(x, gain)
            k = linear(h, maker["k_proj"]).reshape(c.num_kv_heads, -1)
            v = linear(h, maker["v_proj"]).reshape(c.num_kv_heads, -1)
            k = self.norm(k, maker["k_norm"]) if c.qk_norm else k
            assert at not in kv, "a token runs each layer at most once"
            kv[at] = self.turn(k, at), v

    def run(self, layer, xs, rows, active=None, skip=()):
        """Leaves `layer`: (position -> hidden states, position -> shares of the slots, position -> cosine).

        rows: those that are made of xs get them; at the split all later ones do, and only the last token goes
        on. active: what may be seen. skip: whose MLP is left out.
        """
        c, p = self.config, self._at(self.params["layers"], layer)
        attention = p["attentions"][0]
        if layer < self.split:
            self.make(layer, xs, attention["norm"], rows[layer])
        elif layer == self.split:
            for row in range(layer, self.rows):
                self.make(row, xs, self.params["shared_norm"], rows[row])
            xs = {max(xs): xs[max(xs)]}
        kv, heads = rows[self.reads[layer]], {}
        for at, x in xs.items():
            q = linear(self.norm(x, attention["norm"]), attention["q_proj"]).reshape(c.num_heads, -1)
            heads[at] = self.turn(self.norm(q, attention["q_norm"]) if c.qk_norm else q, at)
        out, shares, cosines = {}, {}, {}
        for at, x in xs.items():
            seen = [j for j in sorted(kv) if j <= at and at - j < c.windows[layer]]
            seen = [j for j in seen if active is None or j in active]
            mixed, share = np.zeros((c.num_heads, c.head_dim)), dict.fromkeys(kv, 0.0)
            for head in range(c.num_heads):
                own = head // (c.num_heads // c.num_kv_heads)
                scores = np.array([heads[at][head] @ kv[j][0][own] for j in seen]) / math.sqrt(c.head_dim)
                probability = np.exp(scores - scores.max())
                probability /= probability.sum()
                for weight, j in zip(probability, seen, strict=True):
                    mixed[head] += weight * kv[j][1][own]
                    share[j] += weight / c.num_heads
            middle = x + linear(mixed.reshape(-1), attention["o_proj"])
            h = self.norm(middle, p["mlp"]["norm"])
            gate = linear(h, p["mlp"]["gate_proj"])
            mlp = linear(gate / (1 + np.exp(-gate)) * linear(h, p["mlp"]["up_proj"]), p["mlp"]["down_proj"])
            out[at] = middle if at in skip else middle + mlp
            shares[at], after = share, middle + mlp
            cosines[at] = middle @ after / np.linalg.norm(middle) / np.linalg.norm(after)
        return out, shares, cosines


def wide(x):
    return np.asarray(x, np.float64)


def leaves(tree):
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from leaves(value)
    if not isinstance(tree, dict | list):
        yield tree


def cut(tree, index):
    if isinstance(tree, dict):
        return {name: cut(value, index) for name, value in tree.items()}
    return [cut(value, index) for value in tree] if isinstance(tree, list) else tree[index]


def linear(x, p):
    return x @ wide(p["kernel"]) + (wide(p["bias"]) if "bias" in p else 0)


def share_of(rate, tokens):
    """Tokens that a share is, of decimal rates, rounded up."""
    return max(1, math.ceil(round(rate * tokens, 9)))


def top(shares, count, last):
    """The `count` positions of the highest shares, `last` first of all; of equal ones the first."""
    order = sorted(shares, key=lambda j: (j != last, -shares[j], j))
    return set(order[:count])


def static_kept(model, tokens, keep):
    """The positions of a prompt that static pruning keeps."""
    probed, last = -(-model.layers // 4), len(tokens) - 1
    xs, total = {i: model.embed(t) for i, t in enumerate(tokens)}, dict.fromkeys(range(len(tokens)), 0.0)
    rows = model.empty()
    for layer in range(probed):
        xs, shares, _ = model.run(layer, xs, rows)
        total = {j: total[j] + shares[last][j] / probed for j in total}
    return top(total, share_of(keep, len(tokens)), last)


class Kept:
    """A prompt of which only some positions were ever there."""

    def __init__(self, model, tokens, kept):
        self.model, self.kv, self.length = model, model.empty(), 0
        self.logits = self._run({i: t for i, t in enumerate(tokens) if i in kept})
        self.length = len(tokens)

    def _run(self, tokens):
        xs = {i: self.model.embed(t) for i, t in tokens.items()}
        for layer in range(self.model.layers):
            xs, _, _ = self.model.run(layer, xs, self.kv)
        return self.model.logits(xs[max(xs)])

    def extend(self, token):
        self.length += 1
        return self._run({self.length - 1: token})


class Lazy:
    """LazyLLM: `seen`: of the last step, what each layer saw; `entered`, `ran`: how many tokens did."""

    def __init__(self, model, tokens, start, end, revive=None):
        self.model, self.revive = model, revive
        self.kv, self.left = model.empty(), [{} for _ in range(model.layers)]
        depths = [layer / model.layers for layer in range(model.layers)]
        self.rates = [1.0 if d < 0.3 else start + (end - start) * min(1, (d - 0.3) / 0.6) for d in depths]
        self.length, self.pairs, self.ran, self.seen = 0, [], [], []
        self.logits = self._run(tokens, None)

    def extend(self, token):
        return self._run([token], self.revive)

    def _run(self, tokens, revive):
        xs = {self.length + i: self.model.embed(t) for i, t in enumerate(tokens)}
        self.length += len(tokens)
        last, active = self.length - 1, set(range(self.length))
        shares, self.entered, self.ran, self.seen, self.pairs = {}, [], [], [], []
        for layer, rate in enumerate(self.rates):
            if rate < (1.0, *self.rates)[layer]:
                self.left[layer].update(xs)
                chosen = top({j: shares[j] for j in active}, share_of(rate, self.length), last)
                there = set(self.kv[self.model.reads[layer]])
                absent = set() if layer > self.model.split else chosen - there - {last}
                if revive is not None:
                    absent = set(sorted(absent, key=lambda j: (-shares[j], j))[:revive])
                xs = {j: self.left[layer][j] for j in absent | {last}}
                active = (chosen & there) | set(xs)
            self.entered.append(len(xs))
            xs, found, _ = self.model.run(layer, xs, self.kv, active)
            shares = found[last]
            self.ran.append(len(xs))
            self.seen.append(active)
            window = self.model.config.windows[layer]
            self.pairs.append(sum(0 <= i - j < window for i in xs for j in active))
        return self.model.logits(xs[last])


class Skipping:
    """FFN-SkipLLM; `skipped` of the last step, positions by layer."""

    def __init__(self, model, tokens, threshold, cold_first, cold_last, warm_up):
        self.model, self.kv, self.length = model, model.empty(), 0
        self.threshold, self.warm_up = threshold, warm_up
        self.middle, self.skipped, self.cosines = range(cold_first, model.layers - cold_last), [], []
        self.logits = self._run(tokens)

    def extend(self, token):
        return self._run([token])

    def _run(self, tokens):
        xs = {self.length + i: self.model.embed(t) for i, t in enumerate(tokens)}
        self.length += len(tokens)
        skips, self.skipped, self.ran = set(), [], []
        for layer in range(self.model.layers):
            skip = set(skips) if layer in self.middle else set()
            xs, _, cosines = self.model.run(layer, xs, self.kv, skip=skip)
            self.skipped.append(skip & set(xs))
            self.ran.append(len(xs))
            if layer in self.middle:
                now = {j: cosine for j, cosine in cosines.items() if j >= self.warm_up and j not in skips}
                self.cosines += now.values()
                skips |= {j for j, cosine in now.items() if cosine >= self.threshold}
        return self.model.logits(xs[self.length - 1])
