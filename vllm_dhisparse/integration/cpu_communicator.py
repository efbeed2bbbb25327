"""What vLLM's CPU communicator lacks for expert layers under data parallelism.

vLLM shares expert layers between data-parallel ranks, which hold different numbers of
tokens, and its CPU build has no collective operations of unequal sizes.
"""

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class UnequalCpuCommunicator(CpuCommunicator):
    """vLLM's communicator with the two operations that it refuses."""

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        """Concatenate the tensors of all ranks, or those of a list one by one.

        Args:
            input_: [sizes[rank], ...].
            dim: 0.
            sizes: first dimension on every rank; None = equal.

        """
        if isinstance(input_, list):
            return [self.all_gatherv(tensor, dim, sizes) for tensor in input_]
        assert dim == 0
        if sizes is None:
            sizes = [input_.shape[0]] * self.world_size
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=self.device_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over ranks and return this rank's part.

        Args:
            input_: [sum of sizes, ...].
            dim: 0.
            sizes: first dimension of each rank's part; None = equal.

        """
        assert dim == 0
        if sizes is None:
            sizes = [input_.shape[0] // self.world_size] * self.world_size
        total = input_.clone()
        distributed.all_reduce(total, group=self.device_group)
        first = sum(sizes[: self.rank_in_group])
        return total[first : first + sizes[self.rank_in_group]]
