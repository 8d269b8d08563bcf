"""What a batch costs on a machine that need not be here: bytes, FLOPs, launches and links.

Every constant says where it comes from. The model is a roofline: a batch takes as long as the
slower of its arithmetic and its memory traffic, and on top of that what nothing overlaps. Neither
torch nor the package's engine is loaded here.
"""

from dataclasses import dataclass, field

from tcb.planning.groups import Layer, LayerGroup, group_layers


@dataclass(frozen=True, slots=True)
class Machine:
    """What one device can do, and how several of them reach each other.

    flops, bandwidth       of the model's dtype, a second; bytes a second
    memory                 bytes
    compute, stream        shares of both that products and reads of the model reach
    launch                 seconds a layer that neither hides
    host, host_sequence    seconds of the host a step, and for each of its sequences
    devices                that hold one model together (tensor parallelism)
    link, latency          bytes a second of an all-reduce, and its seconds however small it is
    overlaps               whether the host plans while the device computes (depth 1)
    sources                where each of these is from
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    compute: float
    stream: float
    launch: float
    host: float
    host_sequence: float
    devices: int = 1
    link: float = 1.0
    latency: float = 0.0
    overlaps: bool = True
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model its costs depend on.

    active     parameters that one token is multiplied with, all layers and the head
    weights    parameters that lie in memory
    windows    window of each layer; None: all positions
    bytes      of one parameter, key or value
    """

    name: str
    active: float
    weights: float
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    windows: tuple[int | None, ...]
    bytes: int = 2

    def groups(self, devices: int) -> tuple[LayerGroup, ...]:
        """The layer groups as one of so many ranks has them."""
        if self.kv_heads % devices:
            raise ValueError(
                f"Number of key value heads {self.kv_heads} must be divisible by tensor parallel "
                f"size {devices}."
            )
        heads = self.kv_heads // devices
        layers = (Layer(i, w, heads, self.dim, self.dim) for i, w in enumerate(self.windows))
        return group_layers(layers)


@dataclass(slots=True)
class Batch:
    """What of a batch its costs depend on; `read` adds one sequence, `decode` many.

    tokens, samples, sequences   counts
    keys                         keys that are read from memory, summed over sequences, for a layer
                                 of each window
    pairs                        products of a query and a key, likewise
    """

    windows: tuple[int | None, ...]
    tokens: int = 0
    samples: int = 0
    sequences: int = 0
    keys: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys, self.pairs = [0] * len(self.windows), [0] * len(self.windows)

    def decode(self, starts: list[int]) -> None:
        """Sequences of these lengths compute one token each, as `read` would have it."""
        count = len(starts)
        self.tokens += count
        self.samples += count
        self.sequences += count
        for place, window in enumerate(self.windows):
            seen = sum(starts) if window is None else sum([min(s, window) for s in starts])
            self.keys[place] += seen + count
            self.pairs[place] += seen + count

    def read(self, start: int, count: int, samples: bool) -> None:
        """A sequence computes positions [start, start + count)."""
        self.tokens += count
        self.samples += samples
        self.sequences += 1
        keys, pairs = self.keys, self.pairs
        for place, window in enumerate(self.windows):
            seen = start if window is None else min(start, window)
            keys[place] += seen + count
            pairs[place] += count * seen + (count * (count + 1)) // 2


class Cost:
    """Seconds of a batch of one model on one machine."""

    def __init__(self, shape: Shape, machine: Machine) -> None:
        self.shape, self.machine = shape, machine
        kinds = dict.fromkeys(shape.windows)
        self.windows = tuple(kinds)
        self._layers = [sum(w == kind for w in shape.windows) for kind in kinds]
        self._kv_bytes = 2 * shape.kv_heads * shape.dim * shape.bytes
        self._pair_flops = 4 * shape.heads * shape.dim

    def batch(self) -> Batch:
        """An empty batch, to be filled by `read`."""
        return Batch(self.windows)

    def device_seconds(self, batch: Batch) -> float:
        """Seconds on the device, links between devices included."""
        shape, machine = self.shape, self.machine
        layers = len(shape.windows)
        head = shape.hidden * shape.vocab
        flops = 2.0 * (shape.active - head) * batch.tokens + 2.0 * head * batch.samples
        traffic = float(shape.weights * shape.bytes)
        for count, keys, pairs in zip(self._layers, batch.keys, batch.pairs, strict=True):
            flops += count * pairs * self._pair_flops
            traffic += count * keys * self._kv_bytes
        share = machine.devices
        arithmetic = flops / share / (machine.flops * machine.compute)
        memory = traffic / share / (machine.bandwidth * machine.stream)
        return max(arithmetic, memory) + layers * machine.launch + self._links(batch, layers)

    def seconds(self, batch: Batch) -> float:
        """Seconds until the next batch can begin: the host's share is hidden where it overlaps."""
        machine = self.machine
        device = self.device_seconds(batch)
        host = machine.host + machine.host_sequence * batch.sequences
        return max(device, host) if machine.overlaps else device + host

    def _links(self, batch: Batch, layers: int) -> float:
        machine, shape = self.machine, self.shape
        if machine.devices == 1:
            return 0.0
        moved = 2 * (machine.devices - 1) / machine.devices
        size = batch.tokens * shape.hidden * shape.bytes * moved
        # one all-reduce behind attention, one behind the MLP
        return 2 * layers * (machine.latency + size / machine.link)


def h200(devices: int = 1) -> Machine:
    """NVIDIA H200 in a node with NVLink."""
    return Machine(
        name=f"{devices} x H200",
        flops=989.4e12,
        bandwidth=4.8e12,
        memory=141e9,
        compute=0.6,
        stream=0.75,
        launch=25e-6,
        host=0.3e-3,
        host_sequence=3.8e-6,
        devices=devices,
        link=450e9,
        latency=12e-6,
        sources=(
            "flops (dense bf16), bandwidth, memory, link (half of 900 GB/s NVLink, a direction): "
            "NVIDIA H200 data sheet",
            "compute, stream, launch, latency: assumed, not measured; a share of 0.6 and 0.75 of "
            "the data sheet, five kernels a layer of 5 us each, 12 us an all-reduce",
            "host, host_sequence: bench/results/host.json, 64 and 256 sequences, page 16",
        ),
    )


SHAPES = {
    "llama-70b": Shape("llama-70b", 70.6e9, 70.6e9, 8192, 128256, 64, 8, 128, 28672, (None,) * 80),
    "llama-8b": Shape("llama-8b", 8.0e9, 8.0e9, 4096, 128256, 32, 8, 128, 14336, (None,) * 32),
    "gemma3-27b": Shape(
        "gemma3-27b",
        27.0e9,
        27.0e9,
        5376,
        262208,
        32,
        16,
        128,
        21504,
        tuple(None if (layer + 1) % 6 == 0 else 1024 for layer in range(62)),
    ),
}
