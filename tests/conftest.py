"""What carries the calls of the tests themselves: the same as those of the services that they start."""

import os

from kvscout_common.transport import Transport, choose, default_transport
from kvscout_common.variables import PREFIX

choose(Transport(os.environ.get(f"{PREFIX}rpc_transport", default_transport())))
