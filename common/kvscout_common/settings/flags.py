"""Command-line flags: each has its environment variable, a section in --help, and one place where it is declared.

The flag `--router-ttl` is the variable `KVSCOUT_ROUTER_TTL`. Flags that several programs have (port, TLS, ...) are read
from `KVSCOUT_<PROGRAM>_<FLAG>` first, then from `KVSCOUT_<FLAG>`, so that one environment can configure all of them.
--help shows the flags that a command names as those to show first; --help-all shows each with its variables. Variables
that are nobody's are warned of (`variables`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import click
from click.types import OptionHelpExtra

from kvscout_common.endpoints import Allowed
from kvscout_common.transport import Transport, default_transport
from kvscout_common.variables import PREFIX, value_of

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=StrEnum)

SERVER = "Server"
BEHAVIOUR = "Behaviour"
PERFORMANCE = "Performance"
SHUTDOWN_DELAY_SECONDS = 5.0
"""Delay where callers find out by health checks: over two intervals of the Envoy configuration that is shipped."""
_UNCUT = 1_000
_ALL = f"{__name__}.all"
"""Key of a context's `meta`: help is about all flags."""
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class ValueOf(click.Choice[E]):
    """One of an enum's members, typed as its value; click itself goes by their names."""

    def __init__(self, kind: type[E]) -> None:
        super().__init__(list(kind))

    def normalize_choice(self, choice: Any, ctx: click.Context | None) -> str:
        return super().normalize_choice(str(choice), ctx)


class SectionedOption(click.Option):
    """An option that names the section of --help it stands in."""

    def __init__(self, *args: Any, section: str = BEHAVIOUR, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Return what --help says beside the flag's own text; variables are left to --help-all where there is more."""
        extra = super().get_help_extra(ctx)
        if isinstance(ctx.command, SectionedCommand) and ctx.command.is_short(ctx):
            extra.pop("envvars", None)
            extra.pop("range", None)
        if extra.get("default") == '""':
            del extra["default"]
        return extra

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Return the value of the first of its variables that has one."""
        names = (self.envvar,) if isinstance(self.envvar, str) else self.envvar or ()
        return next(filter(None, map(value_of, names)), None)


class _Described(click.Command):
    """A command with -h and --version that is listed with all of its first sentence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        click.version_option(package_name="kvscout")(self)

    def get_short_help_str(self, limit: int = 45) -> str:
        """Return the first sentence, which click would cut."""
        return super().get_short_help_str(_UNCUT)


class SectionedGroup(_Described, click.Group):
    """A group of commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command.

        Raises:
            NoSuchCommand: There is none of the name; names the nearest.
        """
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            names = self.list_commands(ctx)
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=names, ctx=ctx) from None


class SectionedCommand(_Described):
    """A command whose --help lists its options by section, or those to show first where it has many.

    Args:
        first: Flags that --help lists, in this order; --help-all lists all. Empty = --help lists all.
    """

    def __init__(self, *args: Any, first: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = tuple(first)
        click.option(
            "--help-all",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help_all,
            hidden=not first,
            help="Show every flag and its environment variables and exit.",
        )(self)

    def is_short(self, ctx: click.Context) -> bool:
        """Return whether help is about some flags only."""
        return bool(self.first) and not ctx.meta.get(_ALL)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; see the class."""
        if not self.is_short(ctx):
            self._format_all(ctx, formatter)
            return
        options = {name: option for option in self.get_params(ctx) for name in option.opts}
        shown = [options[name] for name in (*self.first, "--help-all", "--help")]
        with formatter.section("Flags to know first"):
            formatter.write_dl([record for one in shown if (record := one.get_help_record(ctx)) is not None])
        formatter.write_paragraph()
        more = sum(isinstance(one, SectionedOption) and one not in shown for one in {*options.values()})
        example = next(one for one in shown if isinstance(one, SectionedOption))
        formatter.write_text(f"{more} more flags: {ctx.command_path} --help-all")
        if example.envvar:
            formatter.write_text(f"Each can be a variable: {example.opts[0]} is {example.envvar[-1]}")

    def _format_all(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections[getattr(parameter, "section", "Other")].append(record)
        for section in sorted(sections, key=lambda name: (name == "Other", name == SERVER, name)):
            with formatter.section(section):
                formatter.write_dl(sections[section])


def _help_all(ctx: click.Context, _parameter: click.Parameter, is_given: bool) -> None:
    if is_given:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def flag(
    name: str, *, section: str = BEHAVIOUR, program: str = "", aliases: tuple[str, ...] = (), **kwargs: Any
) -> Callable[[F], F]:
    """Declare a flag.

    Args:
        name: The flag as typed, such as "--router-ttl" or "--a/--no-a".
        section: Section of --help.
        program: If given, `KVSCOUT_<PROGRAM>_<FLAG>` is read before `KVSCOUT_<FLAG>`.
        aliases: Former names of it, which go on working.
        kwargs: As for `click.option`.
    """
    stem, *former = (one.split("/", maxsplit=1)[0].lstrip("-").replace("-", "_").upper() for one in (name, *aliases))
    variables = [PREFIX + stem, *(PREFIX + one for one in former)]
    if program:
        variables.insert(0, f"{PREFIX}{program.upper()}_{stem}")
    kwargs.setdefault("show_default", True)
    return click.option(
        name,
        *aliases,
        cls=SectionedOption,
        section=section,
        envvar=[*variables, *kwargs.pop("envvar", [])],
        show_envvar=True,
        **kwargs,
    )


def flag_group(*declared: Callable[[F], F]) -> Callable[[F], F]:
    """Return several flags as one decorator; --help lists them in this order."""

    def decorate(function: F) -> F:
        for declare in reversed(declared):
            function = declare(function)
        return function

    return decorate


def names_of(declared: Callable[[F], F]) -> frozenset[str]:
    """Return the names of the values of several flags."""
    command: Any = declared(lambda: None)  # type: ignore[arg-type]
    return frozenset(parameter.name for parameter in command.__click_params__)


def server_flags(program: str, *, port: int, metrics_port: int, discovers: bool = True) -> Callable[[F], F]:
    """Return the flags that every gRPC server has; `config.ServerConfig.from_flags` reads them back.

    Args:
        program: Name of the service, for its environment variables.
        port: Default gRPC port.
        metrics_port: Default metrics port.
        discovers: Whether it follows DNS names and pods.
    """

    def server_flag(name: str, **kwargs: Any) -> Callable[[F], F]:
        return flag(name, program=program, **{"section": SERVER, **kwargs})

    discovery = [
        server_flag(
            "--workers-dns",
            multiple=True,
            help="dns://name:port?model=…&block_size=…: each address of the name is a worker; repeat for several "
            "names.",
        ),
        server_flag(
            "--workers-k8s",
            multiple=True,
            help="Label selector of pods, or pool/NAME of an InferencePool, optionally with ?port=…&role=…: each "
            "pod is a worker; repeat for several.",
        ),
        server_flag(
            "--kubeconfig",
            type=_FILE,
            help="Kubeconfig for --workers-k8s outside the cluster; by default the pod's service account, or "
            "kubectl's configuration.",
        ),
    ]
    declared = [
        server_flag("--host", default="127.0.0.1", help="Address to bind."),
        server_flag("--port", default=port, type=click.IntRange(0, 65535), help="gRPC port; 0 = any free one."),
        server_flag(
            "--metrics-port",
            default=metrics_port,
            type=click.IntRange(-1, 65535),
            help="Prometheus port; 0 = any free one, -1 = none.",
        ),
        server_flag(
            "--metrics-worker-ranks",
            default=64,
            type=click.IntRange(min=0),
            help="Worker ranks with individual series on /metrics; the others are summed.",
        ),
        server_flag("--workers-file", type=_FILE, help="YAML file of workers, watched for changes."),
        *(discovery if discovers else ()),
        server_flag("--auth-tokens", type=_FILE, help="YAML file of bearer tokens; required beyond loopback."),
        server_flag(
            "--allow-anonymous",
            is_flag=True,
            help="Serve beyond loopback without tokens, on a trusted network.",
        ),
        server_flag(
            "--metrics-auth",
            is_flag=True,
            help="Require a token of --auth-tokens with access to all tenants on the metrics port.",
        ),
        server_flag("--tls-cert", type=_FILE, help="Server certificate chain, PEM; enables TLS."),
        server_flag("--tls-key", type=_FILE, help="Private key of --tls-cert, PEM."),
        server_flag("--tls-client-ca", type=_FILE, help="Require client certificates signed by this CA, PEM."),
        server_flag(
            "--max-message-bytes",
            default=64 * 1024 * 1024,
            type=click.IntRange(min=4096),
            help="Largest message accepted.",
        ),
        server_flag(
            "--request-memory-bytes",
            default=512 * 1024 * 1024,
            type=click.IntRange(min=8192),
            help="Memory for requests being received or not yet answered by an engine; half of it per tenant. "
            "Requests above the limit are refused.",
        ),
        server_flag(
            "--max-concurrent-streams",
            default=1000,
            type=click.IntRange(min=1),
            help="Open calls per connection; a client queues further ones.",
        ),
        server_flag(
            "--max-connection-age-seconds",
            default=0.0,
            type=click.FloatRange(min=0),
            help="Approximate time for which a connection accepts new calls, so that clients reach new replicas "
            "behind one address; running calls continue. 0 = unlimited.",
        ),
        server_flag(
            "--grace-seconds",
            default=120.0,
            type=click.FloatRange(min=0),
            help="Time for running calls to complete after SIGTERM; a second SIGTERM ends the wait.",
        ),
        server_flag(
            "--shutdown-delay-seconds",
            default=None,
            type=click.FloatRange(min=0),
            help="Time after SIGTERM in which health is NOT_SERVING but new calls are still accepted, for callers that"
            f" rely on health checks; unset = {SHUTDOWN_DELAY_SECONDS:g} with an endpoint picker, else 0.",
        ),
        server_flag(
            "--rpc-transport",
            default=default_transport().value,
            type=click.Choice([transport.value for transport in Transport]),
            section=PERFORMANCE,
            help="gRPC implementation: native = the extension, default where it is built; grpcio.",
        ),
        server_flag(
            "--log-level",
            default="info",
            type=click.Choice(["debug", "info", "warning", "error"]),
            help="Minimum severity of logged messages.",
        ),
        server_flag(
            "--log-format", default="text", type=click.Choice(["text", "json"]), help="Format of log lines on stderr."
        ),
        server_flag(
            "--otlp-endpoint",
            default="",
            help="Send traces to this OTLP receiver, http(s)://host:4318; needs the extra otel. Unset = no traces.",
        ),
        server_flag(
            "--trace-ratio",
            default=1.0,
            type=click.FloatRange(0, 1),
            help="Share of requests without a trace that start one; others follow the sampling of their trace.",
        ),
    ]
    return flag_group(*declared)


def event_endpoints_flag() -> Callable[[F], F]:
    """Return what a service that reads events may open for it; `endpoints.Allowed` names them."""
    return flag(
        "--allow-event-endpoints",
        multiple=True,
        type=ValueOf(Allowed),
        help="Event endpoints allowed besides TCP connections: ipc = local paths, bind = listening ports; "
        "repeat for both.",
    )


def client_flags(section: str = SERVER) -> Callable[[F], F]:
    """Return the flags of every gRPC client; `channel.ClientSecurity` takes them."""
    token = flag("--token-file", section=section, type=_FILE, help="File with the bearer token for calls to servers.")
    return flag_group(client_tls_flags(section), token)


def client_tls_flags(section: str = SERVER) -> Callable[[F], F]:
    """Return those for TLS: how a server is trusted, and how it trusts the client."""
    declared = [
        flag("--tls-ca", section=section, type=_FILE, help="CA of the servers called, PEM; enables TLS."),
        flag("--tls-client-cert", section=section, type=_FILE, help="Client certificate for calls to servers, PEM."),
        flag("--tls-client-key", section=section, type=_FILE, help="Private key of --tls-client-cert, PEM."),
    ]
    return flag_group(*declared)
