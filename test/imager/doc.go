// Package imager holds no code, only a test: Talos's own imager, as users run it, gets the extension from the OCI
// layout that `make image` wrote, and the initramfs that comes out is unpacked and compared with what went in.
// `make imager-test` has test/talos build the imager of the selected release, and installs the programs that it calls.
//
// What is not real: the initramfs that the extension is added to, which the imager takes from an image that only a
// registry has. It is made here, of a root file system with one file; the imager copies it as it is. And where
// squashfs-tools is older than 4.6 (Debian 12), an option of mksquashfs is translated: see squashfs-tools-4.5.
//
// The imager checks the manifest and the compatibility it declares. What lies in rootfs it does not look at (Talos
// v1.13.5 sets ExtensionValidateContents nowhere): packaging/image does.
package imager
