// Command sbom writes the bill of materials of a release: of the builds of talos-ccm for all architectures, which must consist of the same
// modules. It takes its time stamp from SOURCE_DATE_EPOCH. It does nothing else.
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
	flags.StringVar(&version, "version", "", "the version of talos-ccm")
	flags.StringVar(&output, "output", "", "the file to write")

	if err := flags.Parse(args); err != nil {
		return err
	}

	if version == "" || output == "" || flags.NArg() == 0 {
		return errors.New("a version, an output and at least one binary are needed")
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

// describe is the one document of all the binaries.
func describe(binaries []string, version string, created time.Time) ([]byte, error) {
	var document []byte

	for _, binary := range binaries {
		this, err := sbom.Modules(binary, version, created)
		if err != nil {
			return nil, err
		}

		if document != nil && !bytes.Equal(document, this) {
			return nil, fmt.Errorf("%s and %s are built of different modules", binaries[0], binary)
		}

		document = this
	}

	return document, nil
}
