// Command sbom writes the SBOM of a release, from the binaries for all architectures, which must contain the same
// modules. The timestamp is SOURCE_DATE_EPOCH.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/talos-ccm/talos-ccm/packaging/sbom"
	"github.com/talos-ccm/talos-ccm/packaging/sourcedate"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sbom:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	var version, output string

	flags := flag.NewFlagSet("sbom -version V -output FILE BINARY…", flag.ContinueOnError)
	flags.StringVar(&version, "version", "", "version of talos-ccm")
	flags.StringVar(&output, "output", "", "file to write")

	if err := flags.Parse(args); err != nil {
		return err
	}

	if version == "" || output == "" || flags.NArg() == 0 {
		return errors.New("-version, -output and at least one binary are required")
	}

	created, err := sourcedate.FromEnvironment()
	if err != nil {
		return err
	}

	document, err := describe(flags.Args(), version, created)
	if err != nil {
		return err
	}

	return os.WriteFile(output, document, 0o644)
}

// describe returns the SBOM of the binaries. It fails unless all binaries have the same.
func describe(binaries []string, version string, created time.Time) ([]byte, error) {
	var document []byte

	for _, binary := range binaries {
		this, err := sbom.Modules(binary, version, created)
		if err != nil {
			return nil, err
		}

		if document != nil && !bytes.Equal(document, this) {
			return nil, fmt.Errorf("%s and %s contain different modules", binaries[0], binary)
		}

		document = this
	}

	return document, nil
}
