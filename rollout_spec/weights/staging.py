"""Staging: new weights are checked and copied before anything is replaced, as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import WeightUpdateError
from ..models import ModelConfig
from ..models.quantized import dense, leaves_of
from . import adapters, checksums, sources, transfer
from .adapters import Adapter
from .arrays import as_array
from .quantizing import WeightQuantizer
from .served import ServedWeights
from .sources import Entry, Key


@dataclass(frozen=True)
class StagingOptions:
    """How weights are checked and taken.

    strict: weights that are missing are a fault; otherwise they stay as they are. check_finite: NaN and infinity
    are faults. checksum: what the sender computed, or None. donate: jax arrays that fit as they are are taken
    over without a copy, and others that have to be converted are deleted once they are. to_host: leave the
    result in host memory.
    """

    strict: bool = True
    check_finite: bool = False
    checksum: str | None = None
    donate: bool = False
    to_host: bool = False


@dataclass
class StagedWeights:
    """Weights that passed every check, ready to be swapped in.

    leaves: in the order of the params tree. unmerged: by leaf number, what an adapter was merged into.
    skipped, merged: names of weights that were left alone, and that got an adapter.
    """

    leaves: list[Any]
    tree: Any
    unmerged: dict[int, Any]
    tensors: int
    bytes: int
    skipped: tuple[str, ...]
    merged: tuple[str, ...]
    _donated: dict[int, transfer.Target] = field(default_factory=dict)
    _own: list[Any] = field(default_factory=list)
    _spent: list[Any] = field(default_factory=list)
    """Donated arrays that were quantised."""

    @property
    def params(self) -> dict:
        return jax.tree.unflatten(self.tree, self.leaves)

    def take_over(self) -> None:
        """Takes donated arrays away from their senders. Nothing can be refused any more after this."""
        places = list(self._donated)
        if places:
            arrays = transfer.taken_over(
                [self.leaves[place] for place in places], list(self._donated.values())
            )
            for place, array in zip(places, arrays, strict=True):
                self.leaves[place] = array
            self._donated.clear()
        _delete(self._spent)

    def to_host(self) -> None:
        """Moves all of it to host memory."""
        self.take_over()
        self.leaves, self.unmerged = jax.tree.map(np.array, (self.leaves, self.unmerged))
        _delete(self._own)

    def discard(self) -> None:
        """Frees what was staged, though an exception's traceback may still refer to it."""
        _delete(self._own)


def stage(
    config: ModelConfig,
    layout: dict,
    served: ServedWeights,
    weights: Any,
    options: StagingOptions = StagingOptions(),
    quantizer: WeightQuantizer | None = None,
    between: Callable[[], None] | None = None,
) -> StagedWeights:
    """`weights` in the layout and dtype of the engine, after all checks, and quantised at last by `quantizer`.

    Args:
        layout: the params tree as jax.ShapeDtypeStructs with shardings. served: what serves now.
        weights: see `RolloutEngine.update_weights`. between: called before a copy once others of
            `transfer.GROUP_BYTES` were made since the last time.

    Raises:
        WeightUpdateError: listing every missing, unknown or repeated weight, every wrong shape and dtype.
    """
    source = sources.open_source(weights)
    staging = _Staging(config, layout, served, options, quantizer, between)
    try:
        if source.streamed:
            for entry in source.entries(config, staging.faults):
                found = staging.checked(entry)
                if found is not None and not staging.faults:
                    staging.place(found)
                del entry, found  # before the next one is made
        else:
            all_found = [staging.checked(entry) for entry in source.entries(config, staging.faults)]
            staging.refuse_faults()
            source.prepare(staging.targets)
            staging.place_all([found for found in all_found if found is not None])
        source.confirm()
        return staging.finish()
    except BaseException:
        staging.discard()
        raise


@dataclass
class _Checked:
    """An entry that fits: the number of its leaf, and an array that may have to be read yet."""

    place: int
    name: str
    value: Any
    transposed: bool


class _Staging:
    def __init__(
        self,
        config: ModelConfig,
        layout: dict,
        served: ServedWeights,
        options: StagingOptions,
        quantizer: WeightQuantizer | None,
        between: Callable[[], None] | None,
    ) -> None:
        self.config = config
        self.quantizer = quantizer
        self.between = between
        self.options = options
        self.served = served
        self.faults: list[str] = []
        found, self.tree = jax.tree_util.tree_flatten_with_path(layout)
        self.keys: list[Key] = [sources.key_of(keys) for keys, _ in found]
        self.layout: list[transfer.Target] = [target for _, target in found]
        self.places = {key: place for place, key in enumerate(self.keys)}
        self.targets = dict(zip(self.keys, self.layout, strict=True))
        self.arrays: dict[int, Any] = {}
        self.adapters: dict[int, Adapter] = {}
        self.names: dict[int, str] = {}
        self.own: list[Any] = []
        self.donated: dict[int, transfer.Target] = {}
        self.spent: list[Any] = []
        self._sent: set[tuple[int, bool]] = set()
        self._hf_names = False
        self._seen_by_steps = self._bytes_since_steps = 0

    # Checks

    def checked(self, entry: Entry) -> _Checked | None:
        """The entry if it fits; otherwise its faults are noted. Adapters are kept for the end."""
        self._hf_names = self._hf_names or entry.hf_layout
        place = self.places.get(entry.key)
        if place is None:
            self.faults.append(f"unknown: {entry.name}")
            return None
        adapter = adapters.as_adapter(entry.value)
        if (place, adapter is not None) in self._sent:
            self.faults.append(f"sent twice: {entry.name}")
            return None
        self._sent.add((place, adapter is not None))
        self.names[place] = entry.name
        target, is_kernel = self.layout[place], entry.key[-1] == "kernel"
        if adapter is not None:
            fitting, faults = adapters.checked(entry.name, adapter, target, is_kernel, entry.hf_layout)
            self.faults += faults
            if fitting is not None:
                self.adapters[place] = fitting
            return None
        value = entry.value
        if not isinstance(value, sources.LazyTensor):
            try:
                value = as_array(value)
            except ValueError as error:
                self.faults.append(f"not an array: {entry.name}: {error}")
                return None
        transposed = entry.hf_layout and is_kernel
        faults = _faults_of(entry.name, value, target, transposed)
        self.faults += faults
        return None if faults else _Checked(place, entry.name, value, transposed)

    def refuse_faults(self) -> None:
        """Raises if anything is wrong so far, or if weights were not sent that should have been."""
        faults = list(self.faults)
        plain = {place for place, is_adapter in self._sent if not is_adapter}
        missing = [self._name(place) for place in range(len(self.keys)) if place not in plain]
        # Adapters alone are whole: whatever has none is as in the base.
        if self.options.strict and (plain or not self._sent):
            faults.extend(f"missing: {name}" for name in missing)
        elif not self._sent and not faults:
            faults.append("no weights at all were given")
        elif missing and self.served.params is None and not faults:
            faults.append("there are no weights to keep or to merge into: sleep dropped them; send all")
        if faults:
            raise refusal(faults)

    def _name(self, place: int) -> str:
        """As the sender would call it."""
        from . import names

        return (
            list(names.expected_paths(self.config))[place] if self._hf_names else ".".join(self.keys[place])
        )

    # Copies

    def place_all(self, found: list[_Checked]) -> None:
        """Copies what was checked; a whole tree of jax arrays by one program."""
        if self.options.donate:
            found = [one for one in found if not self._keep_for_taking_over(one)]
        together = (
            len(found) == len(self.keys)
            and not self.options.to_host
            and not self.options.donate
            and all(isinstance(one.value, jax.Array) and not one.transposed for one in found)
        )
        if together:
            targets = [self.layout[one.place] for one in found]
            for group in transfer.groups(targets, small=self.between is not None):
                self._let_steps_run()
                copies = transfer.placed_together(
                    [found[place].value for place in group], [targets[place] for place in group]
                )
                self.own += copies
                self.arrays.update(zip((found[place].place for place in group), copies, strict=True))
            return
        for one in found:
            self._let_steps_run()
            self._copy(one)
            one.value = None  # perhaps the last hold on what the sender let go of

    def place(self, one: _Checked) -> None:
        """Copies one weight of a stream; it has been read when this returns."""
        if not (self.options.donate and self._keep_for_taking_over(one)):
            self._let_steps_run()
            jax.block_until_ready(self._copy(one))

    def _let_steps_run(self) -> None:
        """Before a copy, if there were large ones since the last time."""
        since, self._seen_by_steps = self.own[self._seen_by_steps :], len(self.own)
        if self.between is None:
            return
        self._bytes_since_steps += sum(copy.nbytes for copy in since)
        if self._bytes_since_steps >= transfer.GROUP_BYTES:
            jax.block_until_ready([copy for copy in since if isinstance(copy, jax.Array)])
            self._bytes_since_steps = 0
            self.between()

    def _keep_for_taking_over(self, one: _Checked) -> bool:
        target = self.layout[one.place]
        if self.options.to_host or one.transposed or not transfer.can_take_over(one.value, target):
            return False
        if any(one.value is self.arrays[place] for place in self.donated):  # one array under two names
            return False
        self.arrays[one.place] = one.value
        self.donated[one.place] = target
        return True

    def _copy(self, one: _Checked) -> Any:
        value = as_array(sources.read(one.value))
        target = self.layout[one.place]
        read_for_us = isinstance(one.value, sources.LazyTensor) and not one.transposed
        if read_for_us and transfer.can_take_over(value, target):
            copy: Any = value
        elif read_for_us and transfer.lies_as(value, target):
            copy = jax.device_put(value, target.sharding)  # which on a CPU keeps the memory
        else:
            copy = transfer.placed(value, target, one.transposed)
        if self.options.to_host:
            copy = transfer.to_host(copy)
        self.own.append(copy)
        self.arrays[one.place] = copy
        if self.options.donate and isinstance(value, jax.Array):
            jax.block_until_ready(copy)
            if not any(value is kept for kept in self._kept_elsewhere()):
                value.delete()
        return copy

    def _kept_elsewhere(self) -> Iterator[Any]:
        """Arrays that must outlive the staging, whoever donated them."""
        yield from jax.tree.leaves(self.served.params)
        yield from jax.tree.leaves(self.served.unmerged)
        yield from (self.arrays[place] for place in self.donated)

    # The end

    def finish(self) -> StagedWeights:
        self.refuse_faults()
        leaves, unmerged = self._merged()
        self._check_values(leaves)
        jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
        skipped = () if self.adapters and not self.arrays else self._skipped()
        replaced_bytes = sum(leaves[place].nbytes for place in {place for place, _ in self._sent})
        leaves = [self._quantized(place, leaf) for place, leaf in enumerate(leaves)]
        unmerged = {place: self._quantized(place, leaf) for place, leaf in unmerged.items()}
        return StagedWeights(
            leaves=leaves,
            tree=self.tree,
            unmerged=unmerged,
            tensors=len({place for place, _ in self._sent}),
            bytes=replaced_bytes,
            skipped=skipped,
            merged=tuple(self.names[place] for place in sorted(self.adapters)),
            _donated=self.donated,
            _own=self.own,
            _spent=self.spent,
        )

    def _quantized(self, place: int, leaf: Any) -> Any:
        """The leaf as the engine keeps it. What it was made from is freed at once, or by its donor later."""
        kept = leaf if self.quantizer is None else self.quantizer.quantized(place, leaf)
        if kept is leaf:
            return leaf
        self.own += jax.tree.leaves(kept)
        if self.donated.pop(place, None) is not None:
            self.spent.append(leaf)
        else:
            _delete([leaf])
        return kept

    def _skipped(self) -> tuple[str, ...]:
        return tuple(
            self._name(place)
            for place in range(len(self.keys))
            if place not in self.arrays and place not in self.adapters
        )

    def _merged(self) -> tuple[list[Any], dict[int, Any]]:
        """All leaves that will serve, and those that adapters were merged into as they were before."""
        served = leaves_of(self.served.params)
        leaves, unmerged = [], {}
        for place, target in enumerate(self.layout):
            if place in self.arrays:
                leaf = self.arrays[place]
            else:
                leaf = self.served.unmerged.get(place, served[place] if served else None)
            if place in self.adapters:
                unmerged[place] = leaf
                base = dense(leaf, target.dtype)
                on_device = base if isinstance(base, jax.Array) else jax.device_put(base, target.sharding)
                leaf = adapters.merged(on_device, self.adapters[place], target)
                if self.options.to_host:
                    leaf = transfer.to_host(leaf)
                self.own.append(leaf)
                if place in self.donated:  # the base is kept beside what serves, so it has to be ours
                    unmerged[place] = transfer.placed(unmerged[place], target, False)
                    self.own.append(unmerged[place])
                    del self.donated[place]
            leaves.append(leaf)
        return leaves, unmerged

    def _check_values(self, leaves: list[Any]) -> None:
        if self.options.check_finite:
            places = [place for place in range(len(leaves)) if place in self.arrays or place in self.adapters]
            finite = jax.device_get([transfer.all_finite(leaves[place]) for place in places])
            faults = [
                f"not finite: {self.names[place]}"
                for place, is_finite in zip(places, finite, strict=True)
                if not is_finite
            ]
            if faults:
                raise refusal(faults)
        if self.options.checksum is not None:
            found = checksums.begin(self.config, jax.tree.unflatten(self.tree, leaves))()
            if found != self.options.checksum:
                raise refusal(
                    [f"checksum: the sender's is {self.options.checksum}, what arrived has {found}"]
                )

    def discard(self) -> None:
        """Frees what was staged, though an exception's traceback may still refer to it."""
        _delete(self.own)
        self.arrays.clear()


def refusal(faults: list[str]) -> WeightUpdateError:
    return WeightUpdateError(
        f"the update was refused and the old weights stay, because of {len(faults)} fault(s):\n  "
        + "\n  ".join(faults)
    )


def warm_up(layout: dict, params: dict, quantizer: WeightQuantizer | None = None) -> None:
    """Compiles what staging arrays of the engine's own dtype needs: groups of a whole tree, and each shape alone."""
    targets = jax.tree.leaves(layout)
    leaves = [dense(leaf, target.dtype) for leaf, target in zip(leaves_of(params), targets, strict=True)]
    for group in [*transfer.groups(targets, small=False), *transfer.groups(targets, small=True)]:
        _delete(
            transfer.placed_together([leaves[place] for place in group], [targets[place] for place in group])
        )
    seen = set()
    for place, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        what = (target.shape, target.dtype, target.sharding)
        if what in seen:
            continue
        seen.add(what)
        copy = transfer.placed(leaf, target, False)
        transfer.all_finite(copy)
        checksums.sums_of(copy)
        if quantizer is not None:
            quantizer.quantized(place, copy)
        if leaf.ndim == 2:
            transfer.placed(jax.jit(jnp.transpose)(leaf), target, True)


def _faults_of(name: str, value: Any, target: transfer.Target, transposed: bool) -> list[str]:
    shape, dtype = sources.shape_and_dtype(value)
    expected = target.shape[::-1] if transposed else target.shape
    faults = []
    if tuple(shape) != tuple(expected):
        faults.append(f"shape: {name}: expected {tuple(expected)}, got {tuple(shape)}")
    if isinstance(dtype, str) or not jnp.issubdtype(dtype, jnp.floating):
        faults.append(f"dtype: {name}: expected a floating type ({target.dtype}), got {dtype}")
    elif isinstance(value, jax.Array) and value.is_deleted():
        faults.append(f"deleted: {name}: its memory was donated or freed")
    return faults


def _delete(arrays: list[Any]) -> None:
    for array in arrays:
        if isinstance(array, jax.Array) and not array.is_deleted():
            array.delete()
    arrays.clear()
