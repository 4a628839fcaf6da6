"""Support for tests of the benchmark: fake storages and scenarios, made-up samples, a workbench without a device."""
