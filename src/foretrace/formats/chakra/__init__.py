"""Chakra execution traces: files <-> `ChakraTrace` <-> `ExecutionGraph`."""

from foretrace.formats.chakra.trace import ChakraTrace, CommType, Dependencies, NodeType, Wire

__all__ = ["ChakraTrace", "CommType", "Dependencies", "NodeType", "Wire"]
