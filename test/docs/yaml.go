package docs

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	talosconfig "github.com/siderolabs/talos/pkg/machinery/config/config"
	"github.com/siderolabs/talos/pkg/machinery/config/configloader"
	"github.com/siderolabs/talos/pkg/machinery/config/types/runtime/extensions"
	"github.com/siderolabs/talos/pkg/machinery/config/types/v1alpha1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

// yaml checks a block of YAML. The tests of package config read blocks with a purpose, too, and compare machine and node.
func (c *Checker) yaml(b block) error {
	switch b.purpose {
	case "", "config", "document":
		return c.documents(b.text)
	case "wrong":
		if c.documents(b.text) == nil {
			return errors.New("a configuration that is marked as wrong is valid")
		}

		return nil
	case "machine", "node":
		return nil
	default:
		return fmt.Errorf("unknown purpose %q of YAML", b.purpose)
	}
}

// documents checks a stream of documents.
func (c *Checker) documents(text string) error {
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}

		if err := errors.Join(err, c.document(document)); err != nil {
			return err
		}
	}
}

// foreign has keys of documents that talos-ccm, Kubernetes and Talos do not read: values of the chart, which test/chart
// renders, Prometheus's configuration, which test/monitoring loads, schematics, and profiles for imager.
var foreign = []string{"image", "scrape_configs", "customization", "input"}

// document checks a document by the type that its keys indicate. By default it is a configuration file of talos-ccm.
func (c *Checker) document(text []byte) error {
	var keys map[string]any
	if err := yaml.UnmarshalStrict(text, &keys); err != nil {
		return err
	}

	switch {
	case keys["apiVersion"] == "v1alpha1", keys["machine"] != nil, keys["cluster"] != nil:
		return c.machineConfig(text)
	case keys["apiVersion"] != nil:
		return c.object(keys)
	case slices.ContainsFunc(foreign, func(key string) bool { return keys[key] != nil }):
		return nil
	default:
		_, err := config.Parse("block", text)

		return err
	}
}

// machineConfig checks a machine configuration or patch as talosctl loads it, with documents for the service and static
// pods as talos-ccm and Kubernetes read them.
func (c *Checker) machineConfig(text []byte) error {
	loaded, err := configloader.NewFromBytes(text, configloader.WithAllowPatchDelete())
	if err != nil {
		return err
	}

	for _, document := range loaded.Documents() {
		switch d := document.(type) {
		case *v1alpha1.Config:
			if d.MachineConfig != nil {
				for _, pod := range d.MachineConfig.MachinePods {
					err = errors.Join(err, c.object(pod.Object))
				}
			}

			continue // a patch, not complete
		case *extensions.ServiceConfigV1Alpha1:
			err = errors.Join(err, c.serviceConfig(d))
		}

		if validator, validates := document.(talosconfig.Validator); validates {
			_, invalid := validator.Validate(metal{})
			err = errors.Join(err, invalid)
		}
	}

	return err
}

// metal is the validation mode of a metal machine.
type metal struct{}

func (metal) String() string        { return "metal" }
func (metal) RequiresInstall() bool { return true }
func (metal) InContainer() bool     { return false }

func (c *Checker) serviceConfig(service *extensions.ServiceConfigV1Alpha1) error {
	if service.ServiceName != extension.Name {
		return nil
	}

	for _, file := range service.ServiceConfigFiles {
		if file.ConfigFileMountPath != settings.MountPath {
			return fmt.Errorf("mount path %s is not %s", file.ConfigFileMountPath, settings.MountPath)
		}

		if _, err := config.Parse("content", []byte(file.ConfigFileContent)); err != nil {
			return err
		}
	}

	return c.accepts(service.ServiceEnvironment)
}

// object checks an object of Kubernetes, and the arguments of a pod that runs talos-ccm.
func (c *Checker) object(object map[string]any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}

	decoded, _, err := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		return err
	}

	if pod, isPod := decoded.(*corev1.Pod); isPod {
		for _, container := range pod.Spec.Containers {
			if strings.Contains(container.Image, "/talos-ccm-pod:") {
				err = errors.Join(err, c.accepts(nil, container.Args...))
			}
		}
	}

	return err
}
