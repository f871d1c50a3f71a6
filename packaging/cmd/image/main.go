// Command image packs binaries into OCI layouts for the extension and for pods, and writes the SBOM of binaries. It does
// not build binaries and does not need Docker.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/talos-ccm/talos-ccm/packaging/image"
	"github.com/talos-ccm/talos-ccm/packaging/sbom"
	"github.com/talos-ccm/talos-ccm/packaging/sourcedate"
)

const megabyte = 1e6

func main() {
	version := flag.String("version", "", "version of talos-ccm")
	revision := flag.String("revision", "", "commit of the binaries")
	layouts := flag.String("layouts", "", "directory to write the OCI layouts oci and oci-pod to; arguments are ARCH=BINARY")
	sbomFile := flag.String("sbom", "", "file to write the SBOM to; arguments are BINARY")
	flag.Parse()

	var err error

	switch {
	case *version == "":
		err = errors.New("-version is required")
	case *layouts != "" && flag.NArg() > 0:
		err = pack(*version, *revision, *layouts, flag.Args())
	case *sbomFile != "" && flag.NArg() > 0:
		err = describe(*version, *sbomFile, flag.Args())
	default:
		err = errors.New("-layouts or -sbom and binaries are required; see -help")
	}

	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

// pack writes the OCI layouts of both images. An existing layout is replaced.
func pack(version, revision, dir string, args []string) error {
	created, err := sourcedate.FromEnvironment()
	if err != nil {
		return err
	}

	manifest, err := os.ReadFile("manifest.yaml")
	if err != nil {
		return fmt.Errorf("read extension manifest: %w", err)
	}

	binaries := map[string][]byte{}

	for _, arg := range args {
		arch, path, ok := strings.Cut(arg, "=")

		switch {
		case !ok || arch == "":
			return fmt.Errorf("%q is not of the form ARCH=BINARY", arg)
		case binaries[arch] != nil:
			return fmt.Errorf("multiple binaries for %s", arch)
		}

		if binaries[arch], err = os.ReadFile(path); err != nil {
			return fmt.Errorf("read binary for %s: %w", arch, err)
		}
	}

	release := image.Release{Version: version, Revision: revision, Created: created, Manifest: manifest}

	extension, err := image.ExtensionIndex(release, binaries)
	if err != nil {
		return err
	}

	pod, err := image.PodIndex(release, binaries)
	if err != nil {
		return err
	}

	return errors.Join(write(filepath.Join(dir, "oci"), extension), write(filepath.Join(dir, "oci-pod"), pod))
}

// describe writes the SBOM of binaries. It fails unless all binaries have the same.
func describe(version, file string, binaries []string) error {
	created, err := sourcedate.FromEnvironment()
	if err != nil {
		return err
	}

	var document []byte

	for _, binary := range binaries {
		this, err := sbom.Modules(binary, version, created)
		if err != nil {
			return err
		}

		if document != nil && !bytes.Equal(document, this) {
			return fmt.Errorf("%s and %s contain different modules", binaries[0], binary)
		}

		document = this
	}

	return os.WriteFile(file, document, 0o644)
}

// write writes an index to dir and prints its digests and compressed sizes.
func write(dir string, index v1.ImageIndex) error {
	if err := image.WriteLayout(dir, index); err != nil {
		return err
	}

	digest, err := index.Digest()
	if err != nil {
		return err
	}

	manifest, err := index.IndexManifest()
	if err != nil {
		return err
	}

	fmt.Printf("%-14s %s\n", dir, digest)

	for _, descriptor := range manifest.Manifests {
		img, err := index.Image(descriptor.Digest)
		if err != nil {
			return err
		}

		contents, err := img.Manifest()
		if err != nil {
			return err
		}

		fmt.Printf("  %-12s %s  %.1f MB\n", descriptor.Platform, descriptor.Digest, float64(contents.Layers[0].Size)/megabyte)
	}

	return nil
}
