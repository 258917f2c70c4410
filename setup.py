"""What pyproject.toml cannot say: a module of a package that the wheel leaves out."""

from setuptools import setup
from setuptools.command.build_py import build_py


class WithoutExamples(build_py):
    """Builds a wheel without the recipe that needs examples/, which is in a checkout alone."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [one for one in found if one[:2] != ("recipes", "evaluate_digits")]


setup(cmdclass={"build_py": WithoutExamples})
