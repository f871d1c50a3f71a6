// Command image packs binaries into OCI layouts for the extension and for pods, pushes them, and writes the SBOM of
// binaries. It does not build binaries and does not need Docker.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/talos-ccm/talos-ccm/packaging/image"
	"github.com/talos-ccm/talos-ccm/packaging/sbom"
	"github.com/talos-ccm/talos-ccm/packaging/sourcedate"
)

const megabyte = 1e6

const usage = `usage:
  image pack -version V [-revision R] [-output DIR] [-pod-output DIR] ARCH=BINARY…
  image push DIR REFERENCE
  image sbom -version V -output FILE BINARY…`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1) //nolint:gocritic // the process exits
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	switch {
	case len(args) > 0 && args[0] == "pack":
		return pack(args[1:], out)
	case len(args) > 0 && args[0] == "sbom":
		return describe(args[1:])
	case len(args) == 3 && args[0] == "push":
		pushed, err := image.Push(ctx, args[1], args[2])
		if err != nil {
			return err
		}

		_, err = fmt.Fprintln(out, pushed)

		return err
	default:
		return errors.New(usage)
	}
}

func pack(args []string, out io.Writer) error {
	var release image.Release

	flags := flag.NewFlagSet("image pack", flag.ContinueOnError)
	flags.StringVar(&release.Version, "version", "", "version of talos-ccm")
	flags.StringVar(&release.Revision, "revision", "", "commit of the binaries")
	manifest := flags.String("manifest", "manifest.yaml", "manifest of the extension")
	output := flags.String("output", "_out/oci", "directory for the OCI layout of the extension")
	podOutput := flags.String("pod-output", "_out/oci-pod", "directory for the OCI layout of the image for pods")

	if err := flags.Parse(args); err != nil {
		return err
	}

	if release.Version == "" || flags.NArg() == 0 {
		return errors.New(usage)
	}

	binaries, err := read(flags.Args())
	if err != nil {
		return err
	}

	if release.Manifest, err = os.ReadFile(*manifest); err != nil {
		return fmt.Errorf("read extension manifest: %w", err)
	}

	if release.Created, err = sourcedate.FromEnvironment(); err != nil {
		return err
	}

	packed, err := image.ExtensionIndex(release, binaries)
	if err != nil {
		return err
	}

	pod, err := image.PodIndex(release, binaries)
	if err != nil {
		return err
	}

	return errors.Join(write(out, *output, packed), write(out, *podOutput, pod))
}

// describe writes the SBOM of binaries. It fails unless all binaries have the same.
func describe(args []string) error {
	flags := flag.NewFlagSet("image sbom", flag.ContinueOnError)
	version := flags.String("version", "", "version of talos-ccm")
	output := flags.String("output", "", "file to write")

	if err := flags.Parse(args); err != nil {
		return err
	}

	if *version == "" || *output == "" || flags.NArg() == 0 {
		return errors.New(usage)
	}

	created, err := sourcedate.FromEnvironment()
	if err != nil {
		return err
	}

	var document []byte

	for _, binary := range flags.Args() {
		this, err := sbom.Modules(binary, *version, created)
		if err != nil {
			return err
		}

		if document != nil && !bytes.Equal(document, this) {
			return fmt.Errorf("%s and %s contain different modules", flags.Arg(0), binary)
		}

		document = this
	}

	return os.WriteFile(*output, document, 0o644)
}

// read reads the binaries given as ARCH=BINARY, by architecture.
func read(args []string) (map[string][]byte, error) {
	binaries := map[string][]byte{}

	for _, arg := range args {
		arch, path, ok := strings.Cut(arg, "=")
		if !ok || arch == "" {
			return nil, fmt.Errorf("%q is not of the form ARCH=BINARY", arg)
		}

		if binaries[arch] != nil {
			return nil, fmt.Errorf("multiple binaries for %s", arch)
		}

		binary, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read binary for %s: %w", arch, err)
		}

		binaries[arch] = binary
	}

	return binaries, nil
}

// write writes an index to dir and prints its digests and compressed sizes.
func write(out io.Writer, dir string, index v1.ImageIndex) error {
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

	fmt.Fprintf(out, "%-14s %s\n", dir, digest)

	for _, descriptor := range manifest.Manifests {
		img, err := index.Image(descriptor.Digest)
		if err != nil {
			return err
		}

		contents, err := img.Manifest()
		if err != nil {
			return err
		}

		fmt.Fprintf(out, "  %-12s %s  %.1f MB\n", descriptor.Platform, descriptor.Digest, float64(contents.Layers[0].Size)/megabyte)
	}

	return nil
}
