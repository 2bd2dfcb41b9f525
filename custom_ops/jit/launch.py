"""Kernels loaded and launched through the CUDA driver, by the rules that the op library follows too
(ops/cuda/gpu_kernel.h).

For the tuner, benchmarks and tests; a graph runs its kernels through its ops."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.jit.image import KernelImage

Enqueue = Callable[[int], None]  # on the CUDA stream that is given


class Module:
    """Code in the current CUDA context (PyTorch's or TensorFlow's primary one, say)."""

    def __init__(self, code: bytes, driver: Any = None) -> None:
        """Load `code`, with the CUDA driver unless another is given.

        Raises:
            KernelError: there is no driver, or the device cannot load the code.
        """
        self.driver = driver or cuda_driver()
        self._module = self.call(self.driver.cuModuleLoadData(code), "load a kernel")

    def close(self) -> None:
        """Unload it, once the device is through with all that was enqueued."""
        with contextlib.suppress(KernelError):  # a context that a kernel broke unloads nothing more
            self.call(self.driver.cuCtxSynchronize(), "wait for the device")
            self.call(self.driver.cuModuleUnload(self._module), "unload a kernel")

    def function(self, name: str) -> Any:
        """The driver's function of that name."""
        return self.call(self.driver.cuModuleGetFunction(self._module, name.encode()), f"find {name}")

    def call(self, returned: tuple[Any, ...], what: str) -> Any:
        """See `checked`."""
        return checked(self.driver, returned, what)


class LoadedKernel:
    """An image that can be launched.

    Attributes:
        image: it.
        registers, local: of the compiled code: registers a thread, bytes of local memory a thread (spills and stack).
        resident: CTAs that the device runs at once.
    """

    def __init__(self, image: KernelImage, module: Module) -> None:
        """
        Args:
            image: of the code that `module` is of.
            module: the loaded code; its owner closes it.

        Raises:
            KernelError: the module has no such kernel, or not one cluster of it fits the device.
        """
        self.image = image
        self._module, self._driver = module, module.driver
        self._configs: dict[tuple[int, int], Any] = {}  # by grid
        self._function = module.function(image.entry)
        attribute = self._driver.CUfunction_attribute
        if image.shared > 48 << 10:
            self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, image.shared, "get its shared memory")
        if image.cluster > 8:
            self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, "allow clusters of 16")
        self.registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local = self._attribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.resident = self._resident()
        if self.resident < image.cluster:
            raise KernelError(f"a cluster of {image.cluster} CTAs does not fit this device")

    def prepare(self, grid: tuple[int, int], words: Sequence[int]) -> Enqueue:
        """One launch, to be enqueued as often as its tensors are there, with little for Python to do.

        Args:
            grid: CTAs along both dimensions.
            words: of 64 bits: the struct that the kernel takes, or its parameters, one in each; it reads as many as it
                has.

        Returns:
            What takes the stream and enqueues. It raises KernelError if the launch fails.
        """
        config = self._configs.get(grid)
        if config is None:  # kept, as to make one takes longer than to launch it
            config = self._configs[grid] = self._config(grid)
        parameter = (ctypes.c_uint64 * len(words))(*words)
        first, size = ctypes.addressof(parameter), ctypes.sizeof(parameter)
        parameters = (ctypes.c_void_p * len(words))(*range(first, first + size, 8))
        driver, function = self._driver, self._function

        def launch(stream: int, _parameter: object = parameter) -> None:  # which `parameters` points to
            config.hStream = stream
            returned = driver.cuLaunchKernelEx(config, function, ctypes.addressof(parameters), 0)
            self._module.call(returned, "launch a kernel")

        return launch

    def _config(self, grid: tuple[int, int]) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.image.threads, 1, 1
        config.sharedMemBytes = self.image.shared
        attributes = self._attributes()
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _attributes(self) -> list[Any]:
        driver, attributes = self._driver, []
        if self.image.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = cluster.value.clusterDim
            size.x, size.y, size.z = self.image.cluster, 1, 1
            attributes.append(cluster)
        if self.image.cooperative:
            cooperative = driver.CUlaunchAttribute()
            cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            cooperative.value.cooperative = 1
            attributes.append(cooperative)
        return attributes

    def _resident(self) -> int:
        driver, image, call = self._driver, self.image, self._module.call
        if image.cluster > 1:
            returned = driver.cuOccupancyMaxActiveClusters(self._function, self._config((image.cluster, 1)))
            return image.cluster * int(call(returned, "fit its clusters"))
        returned = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, image.threads, image.shared)
        of_one = int(call(returned, "fit its CTAs"))
        device = call(driver.cuCtxGetDevice(), "find the device")
        name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return of_one * int(call(driver.cuDeviceGetAttribute(name, device), "count its processors"))

    def _set(self, name: Any, value: int, what: str) -> None:
        self._module.call(self._driver.cuFuncSetAttribute(self._function, name, value), what)

    def _attribute(self, name: Any) -> int:
        return int(self._module.call(self._driver.cuFuncGetAttribute(name, self._function), "read its registers"))


def checked(driver: ModuleType, returned: tuple[Any, ...], what: str) -> Any:
    """The value that a driver call returned.

    Raises:
        KernelError: it failed; with the driver's words.
    """
    result, *values = returned
    if result != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(result)[1]
        raise KernelError(f"CUDA could not {what}: {text.decode() if text else result}")
    return values[0] if values else None


def cuda_driver() -> ModuleType:
    """The driver API, started.

    Raises:
        KernelError: cuda-bindings, the driver or a GPU is missing.
    """
    try:
        from cuda.bindings import driver

        (result,) = driver.cuInit(0)
    except (ImportError, RuntimeError) as error:
        raise KernelError(
            f"GPU kernels need an NVIDIA driver and cuda-bindings ({error}); install the extra 'gpu', tfmem[gpu]"
        ) from error
    if result != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"the CUDA driver does not start: {driver.cuGetErrorString(result)[1].decode()}")
    return driver
