// Package imager tests the extension image with Talos's imager. The imager adds the extension from the OCI layout of
// `make image` to an initramfs, and the tests unpack the result and compare it with the image. `make imager-test` builds
// the imager of the selected release with test/talos, and installs the commands that it executes.
//
// The tests of the imager differ from production in two points. The initramfs is not that of Talos, which is only
// available from a registry; it contains a root file system with one file, and the imager copies it unchanged. If
// squashfs-tools is older than 4.6, as in Debian 12, squashfs-tools-4.5 replaces an option of mksquashfs.
//
// The imager validates the manifest and the compatibility with Talos. It does not validate the contents of rootfs, because
// Talos v1.13.5 does not set ExtensionValidateContents. packaging/image validates them.
//
// `make factory-test` runs Image Factory and the commands of its guide beside a registry. Image Factory contains the imager
// of one release of Talos, which test/factory/go.mod selects, so `make imager-test` remains the test of other releases. The
// images of Talos in the registry contain such an initramfs and no kernel, because Talos's are only available from a
// registry; for the same reason hack/copy-artifacts.sh does not run, and the images have no signatures of Sidero Labs.
package imager
