"""What lives on the device: weights, cache and sampling tables, and the calls that use them."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from . import page_moves
from .batch import table_rows
from .cache_scales import calibration
from .config import EngineConfig
from .draft.config import DraftConfig
from .errors import CapacityError, ConfigError, EngineStateError
from .host_cache import PageContent
from .kernels.backend import resolve_backend
from .kernels.sampling import BLOCK_SIZE, SEEN_IN_PROMPT, STOP_TOKEN, TreeSample
from .kernels.sampling.limits import check_limits as check_sampling_limits
from .kernels.tree_attention import kv_pages_shape
from .kernels.tree_attention.limits import check_latent_limits, check_limits
from .look_ahead import LookAhead
from .models import ModelConfig
from .models.quantized import WEIGHT_TYPES, dense, leaves_of
from .requests import Sequence
from .sharding import MeshLayout
from .slots import SlotTable
from .step import StepState, cache_shape, compiled_step, new_state, state_sharding, write_tables
from .step_inputs import HostBatch, StepShape, unpack_results
from .weights import checksums
from .weights.quantizing import WeightQuantizer
from .weights.served import ServedWeights

_MOST_CPU_CACHE_BYTES = 2**30
_SHARE_OF_FREE_DEVICE_MEMORY = 0.4


@dataclass(frozen=True)
class StepOutcome:
    """A step's results on the host, and the seconds from the call to their arrival."""

    sample: TreeSample
    """Of numpy arrays."""
    seconds: float
    first_of_its_shape: bool
    """The time may include a compilation."""
    draft_tokens: NDArray[np.int32] | None = None
    """int32[S, depth, choices]: what the policy's heads draft behind each sequence, see `look_ahead.Drafts`."""
    draft_probs: NDArray[np.float32] | None = None


class Executor:
    """Owns the device arrays of one engine."""

    def __init__(
        self,
        model_config: ModelConfig,
        params: dict,
        config: EngineConfig,
        max_seq_len: int,
        mesh_layout: MeshLayout | None = None,
    ) -> None:
        self.model_config = model_config
        self.config = config
        self.layout, self._elsewhere = weight_layout(params, mesh_layout)
        self.look_ahead = look_ahead_of(model_config, config.draft)
        self._state_sharding: Any = self._elsewhere
        scaled = config.cache_dtype is not None
        if mesh_layout is not None:
            self._state_sharding = state_sharding(
                mesh_layout, config.max_seqs, self.look_ahead, scaled=scaled
            )
        weight_type = config.weight_dtype
        self.quantizer = (
            None if weight_type is None else WeightQuantizer(self.layout, WEIGHT_TYPES[weight_type])
        )
        placed = self._placed(params)
        self.weights = ServedWeights(placed, functools.partial(checksums.begin, model_config))
        self.dtype = jax.tree.leaves(self.layout)[0].dtype
        self.cache_dtype = cache_dtype_of(model_config, config, self.dtype)
        # Draft nodes may lie behind the last position of the text.
        behind = config.draft.max_nodes + (0 if self.look_ahead is None else self.look_ahead.depth)
        self.pages_per_sequence = -(-(max_seq_len + behind) // config.page_size)
        self.slots = SlotTable(config.max_seqs, self.pages_per_sequence)
        self.num_pages = config.kv_pages or self._default_pages(max_seq_len)
        self._check_kernel_limits()
        self._step = compiled_step(
            model_config,
            config.kernel,
            self._elsewhere,
            mesh_layout,
            config.max_seqs,
            self.look_ahead,
            scaled,
        )
        self._calibrate = None
        if scaled:
            self._calibrate = calibration(
                model_config, self.look_ahead is not None, self.cache_dtype, self._elsewhere, mesh_layout
            )
        self._scales: NDArray[np.float32] | None = None
        """Of an 8-bit cache, on the host too: the state that holds them may be freed or lost."""
        self._scales_are_due = scaled
        self._run_before: set[StepShape] = set()
        self._state: StepState | None = self._new_state()

    def _placed(self, params: dict) -> dict:
        """The weights that an engine is made with, on the devices and quantised, one after the other."""
        targets, tree = jax.tree.flatten(self.layout)
        leaves = []
        for place, (leaf, target) in enumerate(zip(jax.tree.leaves(params), targets, strict=True)):
            array = jax.device_put(_owned(leaf), target.sharding)
            leaves.append(array if self.quantizer is None else self.quantizer.quantized(place, array))
        return jax.tree.unflatten(tree, leaves)

    def _check_kernel_limits(self) -> None:
        """Raises KernelLimitError where the kernels that steps would use don't support the model or the pages."""
        if resolve_backend(self.config.kernel) != "pallas":
            return
        model, tokens = self.model_config, self.config.max_batch_tokens
        if self.config.kernel == "pallas":  # "auto" samples by the reference where the kernel can't
            check_sampling_limits(model.vocab_size, BLOCK_SIZE)
        if model.latent is not None:
            latents = cache_shape(
                model, num_pages=self.num_pages, page_size=self.config.page_size, dtype=self.cache_dtype
            )
            check_latent_limits(
                jax.ShapeDtypeStruct((tokens, model.num_heads, latents[-1]), self.dtype),
                jax.ShapeDtypeStruct((tokens, 1, latents[-1]), self.dtype),
                jax.ShapeDtypeStruct(latents, self.cache_dtype),
                jax.ShapeDtypeStruct((self.config.max_seqs, self.pages_per_sequence), jnp.int32),
                latent_dim=model.latent.kv_rank,
                scale=model.attention_scale,
            )
            return
        pages = kv_pages_shape(
            self.num_pages, self.config.page_size, model.num_kv_heads, model.head_dim, self.cache_dtype
        )
        check_limits(
            jax.ShapeDtypeStruct((tokens, model.num_heads, model.head_dim), self.dtype),
            jax.ShapeDtypeStruct((tokens, model.num_kv_heads, model.head_dim), self.dtype),
            jax.ShapeDtypeStruct(pages, self.cache_dtype),
            jax.ShapeDtypeStruct((self.config.max_seqs, self.pages_per_sequence), jnp.int32),
            scale=model.attention_scale,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, and over the heads if they draft."""
        model, size = self.model_config, self.config.page_size
        cache = int(np.prod(cache_shape(model, num_pages=1, page_size=size, dtype=self.cache_dtype)))
        cache *= self.cache_dtype.itemsize
        if self.look_ahead is None:
            return cache * model.num_layers
        states = (model.num_caches - model.num_layers - 1) * size * model.hidden_size
        return cache * model.num_caches + states * self.dtype.itemsize

    @property
    def shapes_run(self) -> int:
        return len(self._run_before)

    def _default_pages(self, max_seq_len: int) -> int:
        page_size, page_bytes = self.config.page_size, self.page_bytes
        one = -(-max_seq_len // page_size)
        device: Any = next(iter(self._elsewhere.device_set))
        budget = _MOST_CPU_CACHE_BYTES
        if device.platform != "cpu":
            memory = device.memory_stats() or {}
            free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
            budget = int(free * _SHARE_OF_FREE_DEVICE_MEMORY) or budget
        pages = min(one * self.config.max_seqs, budget // page_bytes)
        if pages < one:
            raise CapacityError(
                f"one sequence of {max_seq_len} tokens needs {one} pages of {page_bytes:,} bytes, and "
                f"{budget:,} bytes are set aside for the cache, enough for {pages * page_size:,} tokens; "
                "set EngineConfig.max_seq_len lower or EngineConfig.kv_pages yourself"
            )
        return pages

    def _new_state(self) -> StepState:
        state = new_state(
            self.model_config,
            num_pages=self.num_pages,
            page_size=self.config.page_size,
            slots=self.config.max_seqs,
            dtype=self.dtype,
            look_ahead=self.look_ahead,
            cache_dtype=self.cache_dtype,
        )
        if self._scales is not None:  # what the host keeps of the cache was stored by them
            state = dataclasses.replace(state, cache_scales=jnp.asarray(self._scales))
        return jax.device_put(state, self._state_sharding)

    @property
    def state(self) -> StepState:
        if self._state is None:
            raise EngineStateError("the engine is asleep or closed and holds no cache; call wake_up() first")
        return self._state

    def run(self, shape: StepShape, batch: HostBatch) -> StepOutcome:
        """One step. The one wait for the device is the fetch of its results."""
        first = shape not in self._run_before
        start = time.perf_counter()
        if self._scales_are_due:
            self._set_scales()
        self._state, packed = self._step(
            self.params, self.state, batch.buffer, shape, self.pages_per_sequence
        )
        results = np.asarray(packed)
        seconds = time.perf_counter() - start
        self._run_before.add(shape)
        sample, words = unpack_results(results, shape.rows)
        if self.look_ahead is None:
            return StepOutcome(sample, seconds, first)
        tokens, probs = words.reshape(2, shape.sequences, self.look_ahead.depth, self.look_ahead.choices)
        return StepOutcome(sample, seconds, first, tokens, probs.view(np.float32))

    def read_pages(self, pages: list[int]) -> list[PageContent]:
        """What pages hold, on the host."""
        return page_moves.read(self.state, pages)

    def write_pages(self, pages: list[int], contents: list[PageContent]) -> None:
        """Sets what pages hold."""
        self._state = page_moves.write(self.state, pages, contents, self._state_sharding)

    def _set_scales(self) -> None:
        """What the weights that serve need for an 8-bit cache; before the first step with them."""
        assert self._calibrate is not None
        scales = self._calibrate(self.params)
        self._state = dataclasses.replace(self.state, cache_scales=scales)
        self._scales = np.array(scales)
        self._scales_are_due = False

    def write_tables(self, sequence: Sequence) -> None:
        """Sets the sampling tables of the sequence's slot."""
        rows = table_rows(sequence, self.model_config.vocab_size, SEEN_IN_PROMPT, STOP_TOKEN)
        state = self.state
        tables = write_tables(state.tables, np.int32(sequence.slot), *rows)
        self._state = dataclasses.replace(state, tables=tables)
        sequence.tables_written = True

    def warm_up_tables(self) -> None:
        """Compiles `write_tables`; the slots' rows are written anew before they are used."""
        vocabulary = self.model_config.vocab_size
        rows = (
            np.zeros(vocabulary, np.int32),
            np.zeros(vocabulary, np.uint8),
            np.zeros(vocabulary, np.float32),
        )
        self._state = dataclasses.replace(
            self.state, tables=write_tables(self.state.tables, np.int32(0), *rows)
        )

    def recover(self) -> bool:
        """After a failed call: replaces state that was donated to it. True if the cache was lost."""
        lost = self._state is not None and any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state))
        if lost:
            self._state = self._new_state()
        return lost

    @property
    def params(self) -> dict:
        """The weights that serve: on the devices, or of numpy arrays while the host keeps them."""
        if self.weights.params is None:
            raise EngineStateError(
                "the weights were dropped by sleep(level=2, keep_weights=False); push new ones with update_weights()"
            )
        return self.weights.params

    @property
    def dense_params(self) -> dict:
        """`params` with quantised kernels multiplied out, in the dtype of the weights that were given."""
        leaves, (targets, tree) = leaves_of(self.params), jax.tree.flatten(self.layout)
        return jax.tree.unflatten(
            tree, [dense(leaf, target.dtype) for leaf, target in zip(leaves, targets, strict=True)]
        )

    def serve(self, params: dict, unmerged: dict[int, Any], *, keeps_cache: bool = False) -> None:
        """Other weights from now on. unmerged: see `ServedWeights`.

        keeps_cache: what is cached goes on being read, so an 8-bit cache keeps its scales.
        """
        self._scales_are_due |= self._calibrate is not None and not keeps_cache
        self.weights.retire()
        self.weights = ServedWeights(params, self.weights.begin_checksum, unmerged)

    def free_cache(self) -> int:
        """Gives the memory of cache and tables back; bytes freed over all devices."""
        freed = sum(_device_bytes(leaf) for leaf in jax.tree.leaves(self._state))
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = None
        return freed

    def new_cache(self) -> None:
        """An empty cache, if there is none."""
        if self._state is None:
            self._state = self._new_state()

    def offload(self, *, keep: bool) -> int:
        """Takes the weights off the devices, to the host or nowhere; bytes freed over all devices."""
        held = {id(leaf): leaf for leaf in jax.tree.leaves((self.weights.params, self.weights.unmerged))}
        freed = sum(_device_bytes(leaf) for leaf in held.values() if isinstance(leaf, jax.Array))
        on_host = jax.tree.map(np.array, (self.weights.params, self.weights.unmerged)) if keep else (None, {})
        if not keep:
            self.weights.retire()
        self.weights.params, self.weights.unmerged = on_host
        return freed

    def restore(self) -> None:
        """Brings weights that the host keeps back to the devices."""
        if self.weights.params is None:
            return
        layout = self.layout if self.quantizer is None else self.quantizer.layout
        self.weights.params = jax.tree.map(_on_device, self.weights.params, layout)
        targets = leaves_of(layout)
        self.weights.unmerged = {
            place: jax.tree.map(_on_device, leaf, targets[place])
            for place, leaf in self.weights.unmerged.items()
        }

    def in_use_bytes(self) -> int | None:
        """What the devices say is in use, over all of them; None where they don't say (CPU)."""
        devices: Any = self._elsewhere.device_set
        counts = [device.memory_stats() for device in devices]
        return None if None in counts else sum(count["bytes_in_use"] for count in counts if count)


def cache_dtype_of(model: ModelConfig, config: EngineConfig, dtype: Any) -> np.dtype:
    """Of keys and values. Raises ConfigError where an 8-bit cache isn't supported."""
    if config.cache_dtype is None:
        return np.dtype(dtype)
    if model.latent is not None:
        raise ConfigError(
            f"EngineConfig.cache_dtype is {config.cache_dtype!r}, and {model.architecture} caches latents, which are "
            "kept in the weights' dtype only; leave cache_dtype None"
        )
    return np.dtype(WEIGHT_TYPES[config.cache_dtype])


def look_ahead_of(model: ModelConfig, draft: DraftConfig) -> LookAhead | None:
    """How the model's heads draft; None if they don't. Raises ConfigError if they should, and there are none."""
    if draft.kind not in ("mtp", "hybrid"):
        return None
    if model.mtp is None:
        raise ConfigError(
            f'DraftConfig(kind="{draft.kind}") drafts from multi-token-prediction heads, and this model has none; '
            'use kind="trie", or add heads with rollout_spec.training.init_mtp_heads and train them'
        )
    return LookAhead(draft.look_ahead, draft.choices)


def weight_layout(params: dict, mesh_layout: MeshLayout | None = None) -> tuple[dict, jax.sharding.Sharding]:
    """Shape, dtype and sharding of each weight, and the sharding of everything else on the devices.

    On a mesh, weights lie as its layout says. Without one, weights that their owner spread over a mesh stay as they
    are, and everything else is on each of its devices. All others go to one device. Committed in any case, because
    jit compiles anew for arrays that are not.
    """
    if mesh_layout is not None:
        return jax.tree.map(_struct, params, mesh_layout.params()), mesh_layout.everywhere
    shardings = {getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)}
    meshes = {found.mesh for found in shardings if isinstance(found, jax.sharding.NamedSharding)}
    spread = len(meshes) == 1 and all(isinstance(found, jax.sharding.NamedSharding) for found in shardings)
    if spread and next(iter(meshes)).size > 1:
        rest: Any = jax.sharding.NamedSharding(next(iter(meshes)), jax.sharding.PartitionSpec())
        return jax.tree.map(lambda leaf: _struct(leaf, leaf.sharding), params), rest
    if any(found is not None and len(found.device_set) > 1 for found in shardings):
        raise ConfigError(
            "params are spread over devices, but not all by NamedShardings of one mesh; place all of them so, or all "
            "on one device"
        )
    first = jax.tree.leaves(params)[0]
    device = next(iter(first.devices())) if isinstance(first, jax.Array) else jax.devices()[0]
    rest = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: _struct(leaf, rest), params), rest


def _struct(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)


def _device_bytes(leaf: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in leaf.addressable_shards)


def _on_device(leaf: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(leaf, target.sharding)


def _owned(leaf: Any) -> jax.Array:
    """A jax array of `leaf`; anything else than one is copied, as its owner may write to it."""
    return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)
