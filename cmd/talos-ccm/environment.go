package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
)

// environmentPrefix is the prefix of the environment variables that set flags.
const environmentPrefix = "TALOS_CCM_"

// serviceVariable matches the variables that a kubelet sets in containers for a Service named talos-ccm.
var serviceVariable = regexp.MustCompile("^" + environmentPrefix + "(SERVICE_(HOST|PORT)|PORT)(_|$)")

// setFromEnvironment sets the flags that are not set on the command line from the variables in environ. A variable
// with the prefix and without a flag is an error, so that no setting is silently ignored.
func setFromEnvironment(flags *pflag.FlagSet, environ []string) error {
	var errs []error

	byVariable := map[string]*pflag.Flag{}

	flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains([]string{"help", "help-all", "version"}, f.Name) { // these print something and exit
			byVariable[environmentPrefix+strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))] = f
		}
	})

	for _, entry := range environ {
		variable, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(variable, environmentPrefix) {
			continue
		}

		f, known := byVariable[variable]

		switch {
		case !known && serviceVariable.MatchString(variable):
		case !known:
			errs = append(errs, fmt.Errorf("environment variable %s: no such flag; see talos-ccm --help-all", variable))
		case f.Changed:
		default:
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s: %w", variable, err))
			}
		}
	}

	return errors.Join(errs...)
}

// checkEnvironment returns the error with which the process would fail if it were started with args and environ.
func checkEnvironment(args, environ []string) error {
	_, err := optionsOf(args, environ)

	return err
}

// optionsOf returns the options of a process that is started with args and environ, and the error with which it would
// fail.
func optionsOf(args, environ []string) (*ccm.Options, error) {
	options, err := ccm.NewOptions()
	if err != nil {
		return nil, err
	}

	logOptions := logs.NewOptions()
	cmd := newCommand(options, logOptions)

	if err := cmd.ParseFlags(args); err != nil {
		return options, err
	}

	return options, errors.Join(setFromEnvironment(cmd.Flags(), environ), logsapi.Validate(logOptions, utilfeature.DefaultFeatureGate, nil).ToAggregate(), options.Validate())
}
