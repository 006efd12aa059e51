"""Build steps that pyproject.toml cannot express: when the extension is built, and the name of a wheel without it.

With a Rust toolchain it is built, or the build fails. Without one the wheel is plain Python, one for every platform,
and says so; `KVSCOUT_NATIVE=0` asks for that, `KVSCOUT_REQUIRE_NATIVE=1` makes it an error.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools_rust.build import build_rust

NATIVE, REQUIRE_NATIVE = "KVSCOUT_NATIVE", "KVSCOUT_REQUIRE_NATIVE"
REMEDY = f"{NATIVE}=0 builds kvscout without it: the same answers, slower"


def _setting(name: str) -> str | None:
    """Return a variable's value; the lower case names of 0.2 are read, too."""
    return os.environ.get(name) or os.environ.get(name.lower())


class Rust(build_rust):
    """Builds the extension, or tells why it does not."""

    def run(self) -> None:
        if _setting(NATIVE) == "0":
            return
        if shutil.which(os.environ.get("CARGO", "cargo")) is None:
            if _setting(REQUIRE_NATIVE) == "1":
                raise SystemExit(f"{REQUIRE_NATIVE}=1, and there is no Rust toolchain: https://rustup.rs")
            print(
                "warning: kvscout is built without its native extension, because there is no Rust toolchain "
                "(https://rustup.rs): the same answers, slower",
                file=sys.stderr,
            )
            return
        native = Path(__file__).parent / "native"
        sources = runpy.run_path(str(native / "kvscout_native/sources.py"))
        built_from = sources["digest"](native)
        try:
            super().run()
        except Exception as error:
            raise SystemExit(f"{error}\nkvscout's native extension cannot be built (above: why); {REMEDY}") from error
        if self.inplace:
            sources["BUILT_FROM"].write_text(built_from)


class Wheel(bdist_wheel):
    """Named after what was built: whether the extension could be is known only then."""

    def run(self) -> None:
        self.run_command("build")
        self.skip_build = True
        built = Path(self.get_finalized_command("build").build_lib)
        if not any(built.glob("kvscout_native/_core*")):
            self.root_is_pure = True
            self.distribution.has_ext_modules = lambda: False
        super().run()


setup(cmdclass={"bdist_wheel": Wheel, "build_rust": Rust})
