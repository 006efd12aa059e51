"""What pyproject.toml cannot say: a wheel without the extension is one for every platform, and says so."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """Looks at what was built: whether the extension could be is known only then."""

    def run(self) -> None:
        self.run_command("build")
        self.skip_build = True
        built = Path(self.get_finalized_command("build").build_lib)
        if not any(built.glob("kvscout_native/_core*")):
            self.root_is_pure = True
            self.distribution.has_ext_modules = lambda: False
        super().run()


setup(cmdclass={"bdist_wheel": Wheel})
