"""A CUDA runtime that follows CUDA's rules for registered memory, without a driver."""

from types import SimpleNamespace


class FakeCudaRuntime:
    """What CUDA documents of these calls; ``log`` holds them in order.

    ``alias`` is added to host addresses: the device may see them elsewhere.
    """

    def __init__(self, devices=1, fail_at=None, alias=0):
        self.devices, self.fail_at, self.alias = devices, fail_at, alias
        self.copies_in_flight = False
        self.ranges, self.log = {}, []

    def getDeviceCount(self):
        return self.devices

    def hostRegister(self, pointer, size, flags):
        if len(self.ranges) == self.fail_at:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        assert size > 0
        assert all(
            pointer + size <= start or start + length <= pointer
            for start, (length, _) in self.ranges.items()
        ), "cudaErrorHostMemoryAlreadyRegistered"
        self.ranges[pointer] = size, flags
        self.log.append(("register", pointer))

    def hostUnregister(self, pointer):
        assert not self.copies_in_flight, "memory goes while a copy reads it"
        del self.ranges[pointer]
        self.log.append(("unregister", pointer))

    def pointerGetAttributes(self, pointer):
        assert any(start <= pointer < start + size for start, (size, _) in self.ranges.items())
        return SimpleNamespace(devicePointer=pointer + self.alias, device=0)

    def deviceSynchronize(self):
        self.copies_in_flight = False
        self.log.append(("synchronize", None))
