package main

import (
	_ "embed"
	"errors"
	"fmt"

	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// document is what the operator adds to the machine configuration of the control plane.
//
//go:embed document.yaml
var document []byte

// labelCapacity is set by a rule of the document.
const labelCapacity = "example.org/capacity"

// readDocument reads the document as Talos does, and returns the name of the extension service and its configuration.
func readDocument() (string, runtime.ExtensionServiceConfigSpec, error) {
	var spec runtime.ExtensionServiceConfigSpec

	loaded, err := configloader.NewFromBytes(document)
	if err != nil {
		return "", spec, fmt.Errorf("read document: %w", err)
	}

	if len(loaded.ExtensionServiceConfigs()) != 1 {
		return "", spec, errors.New("read document: not an ExtensionServiceConfig")
	}

	service := loaded.ExtensionServiceConfigs()[0]
	spec.Environment = service.Environment()

	for _, file := range service.ConfigFiles() {
		spec.Files = append(spec.Files, runtime.ExtensionServiceConfigFile{Content: file.Content(), MountPath: file.MountPath()})
	}

	return service.Name(), spec, nil
}
