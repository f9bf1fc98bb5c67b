"""Causal block-term attention: Ma et al. 2019, "A Tensorized Transformer for Language Modeling"."""

import torch
from torch import Tensor, nn

#: Rows i of the attention tensor that are computed together; their keys and values end at the last
#: of these rows.
ROWS = 8


class TensorizedAttention(nn.Module):
    r"""Attention whose weights are a tensor over queries i, keys j and values k; there is no
    softmax over positions.

    With q, k, v = chunk(x W), each (T, R), positions p = P W_p, (T, R), and one vector g, (R,), the
    mean of the cores:

        A_ijk = sum_r g_r [(q_i + u)_r k_jr + (q_i + w)_r p_jr] v_kr   for j <= i and k <= i
        A_ijk = 0                                                      otherwise
        y_i = sum_{j, k} A_ijk O_jk,      O: (T_max, T_max, C)

    A shorter block uses the first rows and columns of O and of P, so a prefix yields the same
    outputs as in the whole block. The mean over cores is exact: A is linear in g (core-2 with g_1
    and g_2 is core-1 with their mean).

    Args:
        dim: channels C.
        rank: R, the size of a core and of queries, keys and values.
        length: T_max, the longest block.
        cores: h, the number of cores.
        softmax: g_r = softmax(core)_r as in the paper; otherwise the core itself, as in the
            authors' code.
        masked: apply the condition on j and k. Without it the model is not causal: row i sees what
            comes after it.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        length: int,
        cores: int = 1,
        softmax: bool = True,
        masked: bool = True,
        std=0.02,
    ):
        super().__init__()
        self.rank, self.length = rank, length
        self.softmax, self.masked = softmax, masked
        self.in_proj = nn.Linear(dim, 3 * rank, bias=False)
        self.position_proj = nn.Linear(dim, rank, bias=False)
        self.out_proj = nn.Parameter(torch.empty(length, length, dim))
        core = torch.rand(cores, rank)
        if not softmax:
            core = core.softmax(dim=-1)
        self.core = nn.Parameter(core)
        for weight in (self.in_proj.weight, self.position_proj.weight, self.out_proj):
            nn.init.normal_(weight, std=std)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """y, (T, B, C), for x, (T, B, C).

        Args:
            positions: P, (T, C).
            content_bias, position_bias: u and w, (R,), which all layers of a model share.
            mask: (B, T) bool, True = padding, which is used neither as key nor as value.
        """
        time, batch, dim = x.shape
        cores = self.core.softmax(dim=-1) if self.softmax else self.core
        g = cores.mean(dim=0)
        query, key, value = self.in_proj(x).transpose(0, 1).chunk(3, dim=-1)  # (B, T, R)
        position_key = self.position_proj(positions)
        content, position = g * (query + content_bias), g * (query + position_bias)
        if mask is not None:
            is_padding = mask.unsqueeze(-1)
            key, value = key.masked_fill(is_padding, 0), value.masked_fill(is_padding, 0)
            position_key = position_key * ~is_padding
        keys, position_keys = key.unsqueeze(1), position_key.unsqueeze(-3)
        step = ROWS if self.masked else time
        places = torch.arange(time, device=x.device)
        outputs = []
        for start in range(0, time, step):
            end = min(start + step, time)  # of these rows, and of the keys and values they see
            of_content = content[:, start:end, None] * keys[:, :, :end]
            of_position = position[:, start:end, None] * position_keys[..., :end, :]
            rows = (of_content + of_position).flatten(1, 2)
            tensor = rows @ value[:, :end].transpose(1, 2)  # (B, rows * end, end)
            tensor = tensor.view(batch, end - start, end, end)
            if self.masked:
                future = places[:end] > places[start:end, None]  # (rows, end)
                tensor = tensor.masked_fill(future[:, :, None] | future[:, None, :], 0)
            output = self.out_proj[:end, :end].reshape(end * end, dim)
            outputs.append(tensor.flatten(2) @ output)
        return torch.cat(outputs, dim=1).transpose(0, 1)
