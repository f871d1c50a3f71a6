// Command talos validates an unpacked extension with one version of the Talos machinery, like the imager and machined
// of that version. Unlike machined, it refuses unknown keys in service specs. A module cannot require two versions,
// so each supported one has a module file (go build -modfile=v1.12.mod).
package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/blang/semver/v4"
	"github.com/siderolabs/talos/pkg/machinery/extensions"
	"github.com/siderolabs/talos/pkg/machinery/extensions/services"
	"go.yaml.in/yaml/v4"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: talos EXTENSION TALOS-VERSION")
		os.Exit(2)
	}

	if err := validate(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func validate(dir, version string) error {
	talos, err := semver.ParseTolerant(version)
	if err != nil {
		return fmt.Errorf("parse Talos version %q: %w", version, err)
	}

	extension, err := extensions.Load(dir)
	if err != nil {
		return fmt.Errorf("load extension: %w", err)
	}

	if err := extension.Validate(extensions.WithValidateConstraints(), extensions.WithValidateContents(), extensions.WithTalosVersion(&talos)); err != nil {
		return fmt.Errorf("validate extension: %w", err)
	}

	specs, err := filepath.Glob(filepath.Join(extension.RootfsPath(), "usr/local/etc/containers/*.yaml"))
	if err != nil {
		return err
	}

	if len(specs) == 0 {
		return errors.New("extension has no service spec")
	}

	for _, path := range specs {
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}

		decoder := yaml.NewDecoder(bytes.NewReader(content))
		decoder.KnownFields(true)

		var spec services.Spec
		if err := errors.Join(decoder.Decode(&spec), spec.Validate()); err != nil {
			return fmt.Errorf("service spec %s: %w", filepath.Base(path), err)
		}
	}

	return nil
}
