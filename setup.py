"""Build minigpt; its name, version and requirements stand in settings.ini, which nbdev reads too."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=cfg["keywords"].split(),
    packages=[cfg["lib_path"]],
    python_requires=f">={cfg['min_python']},<3.14",
    install_requires=cfg["requirements"].split(),
    extras_require={name: cfg[f"{name}_requirements"].split() for name in ("dev", "bench")},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Education",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
    ],
)
