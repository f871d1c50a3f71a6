// Command patches applies patches to machine configurations that one version of the Talos machinery generates, and
// validates the results as machined of that version does. A module cannot require two versions, so each supported one has
// a module file (go build -modfile=v1.12.mod).
//
// It reads a JSON list of patches, and prints a list of their errors, which are empty for accepted patches. Its arguments
// are the version that created the cluster and the type of the machine, controlplane or worker.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/siderolabs/talos/pkg/machinery/config"
	"github.com/siderolabs/talos/pkg/machinery/config/configpatcher"
	"github.com/siderolabs/talos/pkg/machinery/config/generate"
	"github.com/siderolabs/talos/pkg/machinery/config/machine"
	"github.com/siderolabs/talos/pkg/machinery/constants"
)

// metal is a platform on which Talos is installed to a disk.
type metal struct{}

func (metal) String() string        { return "metal" }
func (metal) RequiresInstall() bool { return true }
func (metal) InContainer() bool     { return false }

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: patches TALOS-VERSION MACHINE-TYPE")
		os.Exit(2)
	}

	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(version, machineType string) error {
	var patches []string
	if err := json.NewDecoder(os.Stdin).Decode(&patches); err != nil {
		return fmt.Errorf("read patches: %w", err)
	}

	generated, err := generated(version, machineType)
	if err != nil {
		return fmt.Errorf("generate machine configuration: %w", err)
	}

	if err := apply(generated, ""); err != nil {
		return fmt.Errorf("validate generated machine configuration: %w", err)
	}

	problems := make([]string, len(patches))

	for i, patch := range patches {
		if err := apply(generated, patch); err != nil {
			problems[i] = err.Error()
		}
	}

	return json.NewEncoder(os.Stdout).Encode(problems)
}

// document is on each machine, because a patch can delete it.
const document = `---
apiVersion: v1alpha1
kind: ExtensionServiceConfig
name: talos-ccm
environment:
  - TALOS_CCM_V=2
`

// generated returns the configuration of talosctl gen config, with a document for talos-ccm.
func generated(version, machineType string) ([]byte, error) {
	contract, err := config.ParseContractFromVersion(version)
	if err != nil {
		return nil, err
	}

	input, err := generate.NewInput("example", "https://10.0.0.11:6443", constants.DefaultKubernetesVersion,
		generate.WithVersionContract(contract), generate.WithInstallDisk("/dev/sda"))
	if err != nil {
		return nil, err
	}

	kind, err := machine.ParseType(machineType)
	if err != nil {
		return nil, err
	}

	provider, err := input.Config(kind)
	if err != nil {
		return nil, err
	}

	content, err := provider.Bytes()

	return append(content, document...), err
}

// apply applies a patch like talosctl patch machineconfig.
func apply(configuration []byte, patch string) error {
	var patches []configpatcher.Patch

	if patch != "" {
		loaded, err := configpatcher.LoadPatch([]byte(patch))
		if err != nil {
			return fmt.Errorf("load patch: %w", err)
		}

		patches = append(patches, loaded)
	}

	output, err := configpatcher.Apply(configpatcher.WithBytes(configuration), patches)
	if err != nil {
		return fmt.Errorf("apply patch: %w", err)
	}

	patched, err := output.Bytes()
	if err != nil {
		return fmt.Errorf("encode patched configuration: %w", err)
	}

	provider, err := configpatcher.WithBytes(patched).Config()
	if err != nil {
		return fmt.Errorf("load patched configuration: %w", err)
	}

	_, err = provider.Validate(metal{})

	return err
}
