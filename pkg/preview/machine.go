package preview

import (
	"fmt"
	"io"

	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

type savedMachine struct {
	// Version is the version of talos-ccm that wrote the file; empty if the file was written by hand.
	Version         string `yaml:"version,omitempty"`
	machine.Machine `yaml:",inline"`
}

// WriteMachine writes a machine with all facts as YAML, for ReadMachine.
func WriteMachine(out io.Writer, m machine.Machine) error {
	document, err := yaml.Marshal(savedMachine{version.Version(), m})
	if err != nil {
		return fmt.Errorf("encode machine %s: %w", m.Nodename, err)
	}

	_, err = out.Write(document)

	return err
}

// ReadMachine reads what WriteMachine has written, or a YAML document with the same keys. Unknown keys are errors. If another
// version of talos-ccm wrote the file, unknown keys are ignored, and otherVersion is that version.
func ReadMachine(text []byte) (m machine.Machine, otherVersion string, err error) {
	var header struct {
		Version string `yaml:"version"`
	}

	if err := yaml.Load(text, &header); err != nil {
		return machine.Machine{}, "", err
	}

	if header.Version != version.Version() {
		otherVersion = header.Version
	}

	var saved savedMachine
	if err := yaml.Load(text, &saved, yaml.WithKnownFields(otherVersion == "")); err != nil {
		return machine.Machine{}, "", err
	}

	return saved.Machine, otherVersion, nil
}
