// Package boot tests the extension on a virtual machine with firmware, a boot loader, a kernel and a disk, which the machines
// of test/talos do not have: the imager's disk image, which is also upgraded to the next release of Talos, and an installation
// on an empty disk. `make boot-test` builds the extension, and the tests build Talos, unless it is in the cache. They require
// root on Linux (amd64) with Debian's archive keys, and QEMU emulates the processor, so that they do not need hardware virtualization.
// Nothing else may listen on 127.0.0.1:123 (UDP) and on port 50000 of 127.77.0.0/24.
//
// Debian's kernel, systemd-boot, udevd and file system programs replace those of Talos, which are only available from a
// registry (see assemble). Talos's machined, installer, imager and init of the initramfs run. SELinux has Talos's policy and
// labels, and is permissive, as by default in Talos, in all tests but one.
//
// The machine runs no Kubernetes, because an emulated processor is too slow: the API server runs on the host, and the test
// registers the machine's Node and requests its serving certificate. There is no other machine in the cluster.
package boot
