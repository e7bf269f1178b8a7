"""The efficient transformers that the paper compares with, as the attention of our encoder: same blocks, data and budget.

Each method has the projections of :class:`sbm_pyg.FullAttention`; between them are a maintained package, or a few lines here:

==============  ============================================================  ===================================
method          computed by                                                   padding
==============  ============================================================  ===================================
linear          ``torch_geometric`` over elu(x) + 1                           masked
linformer       ``linformer``                                                 masked before the projection
reformer        ``transformers``, its ``LSHSelfAttention``                    a function of the sequence's length
performer       ``torch_geometric`` over positive features, which are here    masked, in the stabilizer too
nystromformer   ``nystrom_attention``; the convolution is here                spread, so that no landmark is empty
==============  ============================================================  ===================================

The result of a sequence does not depend on the rest of its batch, with any of them (``tests/lra/test_lra_baselines.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn.attention.performer import linear_attention, orthogonal_matrix

from examples.common.command import require
from sbm_pyg import pad
from sbm_pyg.graphs.ragged import draw_seed
from sbm_pyg.ops import checks

if TYPE_CHECKING:
    from examples.lra.settings import Settings


class Baseline(nn.Module):
    """An attention layer from ragged tokens ``[N, channels]`` to ``[N, H*C]``: projections here, the method over padded sequences in :meth:`attend`.

    Half precisions are raised to float32 in between, as in the paper's baselines.
    """

    shared = False  # whether keys are the queries

    def __init__(self, settings: Settings, channels: int, head_channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.lin_query = nn.Linear(channels, heads * head_channels)
        self.lin_key = None if self.shared else nn.Linear(channels, heads * head_channels)
        self.lin_value = nn.Linear(channels, heads * head_channels)

    def forward(
        self, x: Tensor, *, ptr: Tensor, seed: int | None = None, sequence_ids: Tensor | None = None, return_choice: bool = False
    ) -> Any:  # fmt: skip
        """Attend; ``seed`` is for methods that are random, ``sequence_ids`` is not used. No graph is made: None."""
        seed = draw_seed() if seed is None else seed
        query = self.lin_query(x)
        key = query if self.lin_key is None else self.lin_key(x)
        heads = (t.unflatten(1, (self.heads, -1)) for t in (query, key, self.lin_value(x)))
        q, k, v = (t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in heads)  # [N, H, C]
        with torch.autocast(x.device.type, enabled=False):
            out = self.ragged(q, k, v, ptr, seed).flatten(1).to(query.dtype)
        return (out, None) if return_choice else out

    def ragged(self, query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, seed: int) -> Tensor:
        """Attends over sequences of each padded size at a time, ``[N, H, C]`` in and out."""
        lengths = ptr.diff()
        sequence = torch.repeat_interleave(lengths, output_size=query.size(0))
        position = torch.arange(query.size(0), device=ptr.device) - ptr[sequence]
        sizes = self.sizes(lengths)
        slot = self.slots(position, lengths[sequence])
        out, places = [], []
        for size in sizes.unique().tolist():
            chosen = sizes == size
            place = chosen[sequence].nonzero()[:, 0]
            at = ((chosen.cumsum(0) - 1)[sequence[place]], slot[place])
            shape = (int(chosen.sum()), size)
            mask = torch.zeros(shape, dtype=torch.bool, device=ptr.device)
            mask[at] = True
            padded = (t.new_zeros(*shape, *t.shape[1:]).index_put(at, t[place]) for t in (query, key, value))
            q, k, v = (t.transpose(1, 2) for t in padded)  # [B, H, L, C]
            out.append(self.attend(q, k, v, mask, seed).transpose(1, 2)[at])
            places.append(place)
        return torch.zeros_like(value).index_copy(0, torch.cat(places), torch.cat(out))

    def sizes(self, lengths: Tensor) -> Tensor:
        """Length to which each sequence is padded, ``[B]``: that of the longest, where masking alone makes padding harmless."""
        return lengths.max().expand_as(lengths)

    def slots(self, position: Tensor, length: Tensor) -> Tensor:
        """Place of each token in its padded sequence, ``[N]``, from its position and the sequence's length."""
        return position

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: int) -> Tensor:
        """Attends over padded sequences ``[B, H, L, C]``, zeros where ``mask`` [B, L] is False; what it returns there is dropped."""
        raise NotImplementedError


class LinearAttention(Baseline):
    r"""Linear attention: :math:`\phi(q_i)^T \sum_j \phi(k_j) v_j / \phi(q_i)^T \sum_j \phi(k_j)` with :math:`\phi = \mathrm{elu} + 1`.

    Cost O(N H C^2). Katharopoulos et al., "Transformers are RNNs", ICML 2020, whose package does not build with
    torch 2. The product is PyG's. The paper's baseline leaves out the denominator.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: int) -> Tensor:
        return linear_attention(F.elu(query) + 1, (F.elu(key) + 1) * mask[:, None, :, None], value)


class PerformerAttention(Baseline):
    r"""FAVOR+: linear attention over positive random features :math:`\exp(w_r^T x - |x|^2 / 2)` of the softmax kernel.

    Cost O(N H C R). Choromanski et al., "Rethinking attention with Performers", ICLR 2021. The directions w are orthogonal with
    norms of Gaussian vectors, drawn once and kept with the weights. PyG has the product and the directions; the features are ours, since
    PyG's are those of a ReLU kernel, and since the stabilizer of ``performer-pytorch`` takes the largest score of the padding, too.
    """

    EPS = 1e-4
    directions: Tensor

    def __init__(self, settings: Settings, channels: int, head_channels: int, heads: int) -> None:
        super().__init__(settings, channels, head_channels, heads)
        features = settings.random_features
        norms = torch.randn(features, head_channels).norm(dim=1, keepdim=True)
        signs = 2 * torch.randint(2, (features, 1)) - 1  # those of QR factors are not random
        self.register_buffer("directions", orthogonal_matrix(features, head_channels) * norms * signs)  # [R, C]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: int) -> Tensor:
        real = mask[:, None, :, None]
        queries, keys = (x * x.size(-1) ** -0.25 for x in (query, key))
        scores = [x @ self.directions.to(x.dtype).T for x in (queries, keys)]  # [B, H, L, R]
        tops = scores[0].amax(-1, keepdim=True), scores[1].masked_fill(~real, -torch.inf).amax((-2, -1), keepdim=True)
        features = [
            torch.exp(score - x.square().sum(-1, keepdim=True) / 2 - top.detach()) + self.EPS
            for score, x, top in zip(scores, (queries, keys), tops, strict=True)
        ]
        return linear_attention(features[0], features[1].masked_fill(~real, 0), value)


class LinformerAttention(Baseline):
    """Softmax attention to k learned mixtures of the keys over all positions, and of the values.

    Cost O(N H C k). Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020, as in the package ``linformer``,
    which has no mask: keys and values of padding are zeros, which mix as nothing.
    """

    def __init__(self, settings: Settings, channels: int, head_channels: int, heads: int) -> None:
        super().__init__(settings, channels, head_channels, heads)
        sizes = (heads * head_channels, settings.max_length, settings.linformer_rank, heads, head_channels)
        package = checks.imported("linformer", "examples")
        self.kernel = package.LinformerSelfAttention(*sizes, dropout=settings.attention_dropout)
        self.kernel.to_q, self.kernel.to_k, self.kernel.to_v = nn.Identity(), _Half(0), _Half(1)
        self.kernel.to_out = nn.Identity()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: int) -> Tensor:
        flat = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]  # [B, L, H*C]
        return self.kernel(flat[0], context=torch.cat(flat[1:], -1)).unflatten(2, (self.heads, -1)).transpose(1, 2)


class ReformerAttention(Baseline):
    """Attention among tokens that hash alike: sorted by hash and cut into chunks, each of which sees itself and the one before.

    Cost O(N H C c r) with chunks of c tokens and r rounds, and sorting. Kitaev et al., "Reformer: The Efficient Transformer",
    ICLR 2020, as in ``transformers`` and in the paper's baseline. Queries are keys. Rotations are a function of the
    seed and of the padded length, which is the sequence's own length rounded up to whole chunks.
    """

    shared = True

    def __init__(self, settings: Settings, channels: int, head_channels: int, heads: int) -> None:
        super().__init__(settings, channels, head_channels, heads)
        self.chunk = settings.hash_chunk
        package: Any = checks.imported("transformers.models.reformer.modeling_reformer", "examples")
        config = package.ReformerConfig(
            attn_layers=["lsh"], attention_head_size=head_channels, num_attention_heads=heads, hidden_size=heads * head_channels,
            num_hashes=settings.hash_rounds, lsh_attn_chunk_length=self.chunk, is_decoder=False,
            lsh_attention_probs_dropout_prob=settings.attention_dropout, max_position_embeddings=settings.max_length,
        )  # fmt: skip
        self.kernel = package.LSHSelfAttention(config)
        self.kernel.query_key, self.kernel.value = _Half(0), _Half(1)

    def sizes(self, lengths: Tensor) -> Tensor:
        # Whole chunks, so that chunks and buckets are those of the sequence by itself.
        return -(-lengths // self.chunk) * self.chunk

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: int) -> Tensor:
        size, buckets = mask.size(1), None
        if size > self.chunk:
            self.kernel.num_buckets = 1 << (2 * (size // self.chunk)).bit_length() - 1  # as the method's authors advise
            with torch.random.fork_rng([query.device] if query.is_cuda else []):
                torch.manual_seed((seed + size) % 2**63)
                buckets = self.kernel._hash_vectors(query, self.kernel.num_hashes, mask)
        joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, value)], -1)  # [B, L, 2*H*C]
        out = self.kernel(joined, attention_mask=mask, buckets=buckets).hidden_states
        return out.unflatten(2, (self.heads, -1)).transpose(1, 2)


class NystromAttention(Baseline):
    """Softmax attention by way of landmarks, the means of m segments, and a convolution of the values.

    Cost O(N H C m + H m^3). Xiong et al., "Nyströmformer", AAAI 2021, as in the package ``nystrom_attention``. A sequence is
    padded to a multiple of m by its own length, and its tokens are spread over the m segments as evenly as they go: no
    segment is empty, and the masked means are of real tokens alone. The pseudoinverse is iterated for each sequence by itself
    (the published code scales all of a batch by one norm). Sequences of at most m tokens get full attention, as published.
    """

    def __init__(self, settings: Settings, channels: int, head_channels: int, heads: int) -> None:
        super().__init__(settings, channels, head_channels, heads)
        self.landmarks, taps = settings.landmarks, settings.value_kernel
        require(taps % 2 or not taps, "'value-kernel' to be odd or 0", taps, "It is centered on its token.")
        sizes = (heads * head_channels, head_channels, heads, self.landmarks)
        self.kernel = checks.imported("nystrom_attention", "examples").NystromAttention(*sizes, residual=False)
        self.kernel.to_qkv = self.kernel.to_out = nn.Identity()
        options: Any = {"padding": (taps // 2, 0), "groups": heads, "bias": False}
        self.conv = nn.Conv2d(heads, heads, (taps, 1), **options) if taps else None

    def sizes(self, lengths: Tensor) -> Tensor:
        return -(-lengths // self.landmarks) * self.landmarks

    def slots(self, position: Tensor, length: Tensor) -> Tensor:
        segment = position * self.landmarks // length  # segment s begins with token ceil(s * length / m)
        return segment * -(-length // self.landmarks) + position - -(-segment * length // self.landmarks)

    def ragged(self, query: Tensor, key: Tensor, value: Tensor, ptr: Tensor, seed: int) -> Tensor:
        out = super().ragged(query, key, value, ptr, seed)
        if self.conv is None:
            return out
        padded, mask = pad(value, ptr)  # [B, L, H, C]
        return out + self.conv(padded.transpose(1, 2)).transpose(1, 2)[mask]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, seed: int) -> Tensor:
        if mask.size(1) == self.landmarks:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        joined = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], -1)  # [B, L, 3*H*C]
        out = torch.vmap(lambda x, real: self.kernel(x[None], mask=real[None])[0])(joined, mask)
        return out.unflatten(2, (self.heads, -1)).transpose(1, 2)


class _Half(nn.Module):
    """The first or the second half of the channels, where a package would project."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, -1)[self.number]


BASELINES: dict[str, type[Baseline]] = {
    "linear": LinearAttention,
    "linformer": LinformerAttention,
    "reformer": ReformerAttention,
    "performer": PerformerAttention,
    "nystromformer": NystromAttention,
}
