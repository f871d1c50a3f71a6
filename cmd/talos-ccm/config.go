package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v4"

	"github.com/talos-ccm/talos-ccm/extension"
	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/config"
	"github.com/talos-ccm/talos-ccm/pkg/settings"
)

func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Validate configuration files and print their schema",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigValidateCommand(), &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON schema of the configuration file",
		Long: `Print the JSON schema of the configuration file.

Editors with a YAML language server validate and complete a file that starts with
"# yaml-language-server: $schema=./schema.json".`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.Schema)

			return err
		},
	})

	return cmd
}

func newConfigValidateCommand() *cobra.Command {
	output := "text"

	cmd := &cobra.Command{
		Use:   "validate FILE|-",
		Short: "Validate a configuration file",
		Long: `Validate a file, or standard input, as talos-ccm does when it loads it. The file may be

- a configuration file of talos-ccm or of the upstream Talos CCM, or
- a file with an ExtensionServiceConfig document, such as a machine configuration. The environment in the document is
  validated, too.

If the file is valid, print a summary and exit with 0. Otherwise print every
error to standard error, one per line with its position, and exit with 1.`,
		Example: `  talos-ccm config validate rules.yaml
  talos-ccm config validate - < rules.yaml
  talos-ccm config validate controlplane.yaml`,
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, args []string) error { return validate(cmd, args[0], output) },
	}

	cmd.Flags().StringVarP(&output, "output", "o", output, "Output format: text or json.")

	return cmd
}

// validation is the result of `config validate` for programs; keep the format stable.
type validation struct {
	File     string           `json:"file"`
	Valid    bool             `json:"valid"`
	Problems []config.Problem `json:"problems"`
}

func validate(cmd *cobra.Command, path, output string) error {
	if !slices.Contains([]string{"text", "json"}, output) {
		return fmt.Errorf("unknown output format %q, want text or json", output)
	}

	name, data, err := readConfig(cmd.InOrStdin(), path)
	if err != nil && output != "json" {
		return err
	}

	var compiled *config.Compiled

	result := validation{File: name, Problems: []config.Problem{}}

	if err != nil {
		result.Problems = []config.Problem{{Msg: err.Error()}}
	} else {
		compiled, err = parseFile(name, data)
	}

	if mistakes, ok := errors.AsType[*config.Error](err); ok {
		result.Problems = mistakes.Problems
		err = fmt.Errorf("%s is invalid", name)
	} else {
		result.Valid = err == nil
	}

	switch {
	case output == "json":
		encoder := json.NewEncoder(cmd.OutOrStdout())
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", "  ")

		return errors.Join(encoder.Encode(result), err)
	case !result.Valid:
		fmt.Fprintln(cmd.ErrOrStderr(), &config.Error{Name: name, Problems: result.Problems})
	default:
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", name, compiled)
	}

	return err
}

// parseFile reads a configuration file, or a file that contains one.
func parseFile(name string, data []byte) (*config.Compiled, error) {
	return config.ParseFile(name, data, config.Extension{Name: extension.Name, MountPath: settings.MountPath, CheckEnvironment: checkVariables})
}

var separators = strings.NewReplacer("_", "", "-", "")

// checkVariables returns why the extension service could not be started with the variables of a document. It refuses
// misspelled prefixes, such as TALOSCCM_, because the service ignores variables without the prefix.
func checkVariables(variables []string) error {
	var service struct {
		Container struct {
			Args []string `yaml:"args"`
		} `yaml:"container"`
	}

	if err := yaml.Unmarshal(extension.Spec, &service); err != nil {
		return err
	}

	options := ccm.Options{CheckEnvironment: func(environ []string) error { return checkEnvironment(service.Container.Args, environ) }}
	errs := []error{options.CheckDocument(variables)}

	for _, variable := range variables {
		name, _, _ := strings.Cut(variable, "=")
		if !strings.HasPrefix(name, environmentPrefix) && strings.HasPrefix(strings.ToUpper(separators.Replace(name)), "TALOSCCM") {
			errs = append(errs, fmt.Errorf("environment variable %s sets no flag: it does not begin with %s", name, environmentPrefix))
		}
	}

	return errors.Join(errs...)
}

// readConfig reads a file, or stdin for "-". It reads at most one byte more than config.Parse accepts.
func readConfig(stdin io.Reader, file string) (name string, data []byte, err error) {
	if name = file; file == "-" {
		name = "stdin"
	}

	if data, err = readInput(stdin, file, config.MaxSize+1); err != nil {
		return name, nil, err
	}

	return name, data, config.CheckNotEmpty(name, data)
}

// readInput reads at most limit bytes of a file, or of stdin for "-".
func readInput(stdin io.Reader, file string, limit int64) ([]byte, error) {
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close() //nolint:errcheck // nothing was written

		stdin = f
	}

	return io.ReadAll(io.LimitReader(stdin, limit))
}
