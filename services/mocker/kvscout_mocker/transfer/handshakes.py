"""The handshakes of vLLM's and SGLang's disaggregated serving, as the role and API of a process want them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig, Role
from kvscout_mocker.engine.kv_transfer import KvTransfer
from kvscout_mocker.engine.rank import Rank
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.transfer.bootstrap import BootstrapServer, RoomClient
from kvscout_mocker.transfer.nixl import Nixl, reachable_host

_log = logging.getLogger(__name__)


class Handshakes:
    """The handshakes of vLLM's and SGLang's disaggregated serving, both sides.

    Args:
        config: Configuration of the process.
        ranks: In order of their number.
    """

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank]) -> None:
        self._config = config
        self.nixl = Nixl(config.transfer, reachable_host(config.host), ranks)
        self.rooms = BootstrapServer(config.transfer, config.dp_size)
        self._room_client = RoomClient(config.transfer)

    async def close(self) -> None:
        """End transfers."""
        await self.nixl.close()
        await self._room_client.close()

    def transfer(self, generation: Generation) -> KvTransfer:
        """Return the transfer of a request.

        Raises:
            InvalidArgument: It lacks what this engine's role needs.
        """
        role = self._config.role
        if role is Role.AGGREGATED:
            if generation.kv_transfer is not None:
                _log.warning("got kv_transfer_params, but this engine takes part in no transfers: ignored")
            return KvTransfer()
        if generation.bootstrap is not None and self._config.has_sglang_api:
            return (self.rooms if role is Role.PREFILL else self._room_client).transfer(generation.bootstrap)
        if not self._config.has_vllm_api:
            raise InvalidArgument("Disaggregated request received without bootstrap room id", field="bootstrap_room")
        return self.nixl.transfer(generation.kv_transfer)
