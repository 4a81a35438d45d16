"""The compiled parts: scanners, writers of text, the cluster engine. Without a C compiler the install goes on."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(name, [f"src/{name.replace('.', '/')}.c"], extra_compile_args=["-O3"], optional=True)
        for name in (
            "foretrace.formats._scanner",
            "foretrace.formats.pytorch_et._scanner",
            "foretrace.formats.chakra._arguments",
            "foretrace.simulate.cluster._engine",
        )
    ]
)
