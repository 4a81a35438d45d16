"""The one compiled part: the scanner of trace events. Without a C compiler the install goes on without it."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "foretrace.formats._scanner",
            ["src/foretrace/formats/_scanner.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
